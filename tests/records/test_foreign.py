"""A record that is none of ours: its script is frozen, trained again and judged."""

import pytest

from records.archive.verdicts import read_verdicts
from records.verify.version import referee_version
from tests.kit import record_kit
from tests.kit.data_kit import call
from tests.kit.record_kit import Author

pytestmark = [pytest.mark.slow, pytest.mark.sandbox]


def test_a_script_of_one_s_own_is_frozen_and_trained_again(tmp_path):
    """Its metrics were packed, and the training gives the artifact back bit for bit."""
    author = Author(tmp_path, second=None, imports=["numpy"])
    assert sorted(path.suffix for path in author.folder.glob("metrics*")) == [".gz"] * 2
    words = [author.folder, "--every-seed", "--retrain", 2, "--write", "--by", "Ada"]
    said = call("records", "verify", *words, "--data", author.data)
    for words in ("retrained: seed 2: the artifact came back bit for bit", "work: ", "train-flops: "):
        assert f"PASS {words}" in said
    for seed in (1, 2):
        assert f"PASS score: seed {seed}: " in said
    assert said.count("PASS proof: ") == 2 and said.endswith("\n1 records, 0 checks failed\n")
    its = read_verdicts(author.track)[author.folder.name]
    assert (its["verdict"], its["retrained"]["by"]) == ("verified", "Ada")
    assert its["referee"] == referee_version()


THREADS = (  # 64 of Python, in training and in the predictor
    ("import time\n", "import threading\nimport time\nfrom concurrent.futures import ThreadPoolExecutor\n"),
    (
        "        self.vocab_size = len(counts)\n",
        "        self.vocab_size = len(counts)\n"
        "        self.pool = ThreadPoolExecutor(64)\n"
        "        together = threading.Barrier(64)\n"
        "        [*self.pool.map(lambda _: together.wait(), range(64))]  # all of them live at once\n",
    ),
    ("return self.logits[ids]", "return np.stack([*self.pool.map(self.logits.__getitem__, ids)])"),
    ("    tokens, headers = read_shards", "    Bigram(np.zeros((2, 2)))\n    tokens, headers = read_shards"),
)


@pytest.mark.cgroups
def test_an_honest_script_is_ranked(tmp_path):
    """Whatever spends its operations, processor seconds bound them."""
    author = Author(tmp_path, (1,), script=record_kit.bigram(*THREADS), second=None)
    places = ["--data", author.data, "--work", tmp_path / "judge"]
    said = call("records", "judge", author.folder, *places, "--write", "--by", "Ada")
    assert said.endswith("\nverdict: ranked\n") and "\nPASS work: seed " in said, said
