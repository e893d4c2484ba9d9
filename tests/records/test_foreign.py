"""A record that is none of ours: its script is frozen, trained again and judged."""

import pytest

from records.archive.verdicts import read_verdicts
from records.verify.version import referee_version
from tests.kit import record_kit
from tests.kit.data_kit import call
from tests.kit.record_kit import MAIN, Author

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
LSTM = """
import torch

torch.set_num_threads(64)
torch.ones(1 << 22).sum()
assert len(os.listdir("/proc/self/task")) >= 64
torch.set_num_threads(1)  # they stay, and so small a model is quicker without them
WIDTH, LENGTH, BATCH = 32, 48, 16


class Lstm(torch.nn.Module):
    rows = 16
    vocab_size = 400

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(self.vocab_size, WIDTH)
        self.lstm = torch.nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids, state=None):
        found, state = self.lstm(self.words(ids), state)
        return found @ self.words.weight.T, state

    def start(self, rows):
        self.state = None
        return np.zeros((rows, self.vocab_size), np.float32)

    @torch.no_grad()
    def step(self, ids):
        logits, self.state = self(torch.from_numpy(ids)[:, None], self.state)
        return logits[:, 0].numpy()


def model_of(weights):
    model = Lstm()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(weights.copy()), model.parameters())
    return model


def load_predictor(artifact, device):
    return model_of(np.frombuffer(Path(artifact).read_bytes(), np.float32))


@torch.no_grad()
def nats(weights, tokens):
    ids = torch.from_numpy(tokens)
    logits, _ = model_of(weights)(ids[None, :-1])
    return float(torch.nn.functional.cross_entropy(logits[0], ids[1:], reduction="sum"))


def train(folder, tokens, size):
    torch.manual_seed(int(os.environ["SEED"]))
    model = Lstm()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    totals = {"train_seconds": 0.0, "train_flops": 0}
    began = time.perf_counter()
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1))
        ids = torch.from_numpy(tokens)[starts + torch.arange(LENGTH + 1)]
        logits, _ = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        products = 4 * WIDTH * 2 * WIDTH + WIDTH * size  # of a token: four gates, and the logits
        totals["train_flops"] += 3 * 2 * products * BATCH * LENGTH
        totals["train_seconds"] = time.perf_counter() - began
        write_event(folder, {"event": "step", "step": step, "train_loss": loss.item(), **totals})
    weights = torch.nn.utils.parameters_to_vector(model.parameters())
    return weights.detach().numpy(), totals


"""
HONEST = {
    "numpy with 64 threads": THREADS,
    "an LSTM with 64 threads": ((MAIN, LSTM + MAIN),),
}


@pytest.mark.cgroups
@pytest.mark.parametrize("kind", HONEST)
def test_an_honest_script_is_ranked(tmp_path, kind):
    """Whatever spends its operations, processor seconds bound them."""
    author = Author(tmp_path, (1,), script=record_kit.bigram(*HONEST[kind]), second=None)
    places = ["--data", author.data, "--work", tmp_path / "judge"]
    said = call("records", "judge", author.folder, *places, "--write", "--by", "Ada")
    assert said.endswith("\nverdict: ranked\n") and "\nPASS work: seed " in said, said
