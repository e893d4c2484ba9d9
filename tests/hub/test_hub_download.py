"""`data download` with the real hub client against tests/kit/hub_server.py.

Each misfortune is one clear line, nothing half-written is a dataset, and a second call goes on.
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from data import shards
from data.files import NO_LOCK
from tests.kit import data_kit, helpers
from tests.kit.launch import contents

pytestmark = pytest.mark.slow

REPO_ID = "willdepueoai/parameter-golf"
DATA = "datasets/fineweb10B_sp1024"
TOKENIZER = "tokenizers/fineweb_1024_bpe.model"
NOWHERE = "http://127.0.0.1:9"
SECOND = "GET .*train_000001"  # the content of the second training shard


# --- a published repo, and calls of the command ----------------------------------------------------------


def shard(seed: int, tokens: int = 3000, extended: bool = False) -> bytes:
    payload = np.random.default_rng(seed).integers(0, 1024, tokens, dtype=np.uint16)
    return helpers.header(payload, extended, vocabulary=1024) + payload.astype("<u2").tobytes()


def manifest(tokenizer: dict | None = None, **dataset) -> bytes:
    ours = {
        "name": "fineweb10B_sp1024",
        "tokenizer_name": "sp_bpe_1024",
        "path": DATA,
        "train_glob": "fineweb_train_*.bin",
        "val_glob": "fineweb_val_*.bin",
        "stats": {"files_train": 4, "files_val": 2},
    } | dataset
    other = ours | {"name": "fineweb10B_sp4096", "path": "datasets/fineweb10B_sp4096"}
    model = {"name": "sp_bpe_1024", "vocab_size": 1024, "model_path": TOKENIZER} | (tokenizer or {})
    return json.dumps({"datasets": [ours, other], "tokenizers": [model]}).encode()


def published(tokens: int = 3000, **changes) -> dict[str, bytes]:
    """Repo files: 4 training and 2 validation shards, one of them with the extended header."""
    files = {f"{DATA}/fineweb_train_{i:06d}.bin": shard(i, tokens, extended=i == 3) for i in range(4)}
    files |= {f"{DATA}/fineweb_val_{i:06d}.bin": shard(100 + i, tokens) for i in range(2)}
    files |= {TOKENIZER: b"\x0amodel" * 500, "manifest.json": manifest(**changes)}
    return {f"datasets/{path}": data for path, data in files.items()} | {"README.md": b"# parameter golf"}


FILES = published()


@pytest.fixture
def hub(hub):
    hub.head = hub.commit(REPO_ID, FILES)
    return hub


def start(hub, root: Path, *args: object, **variables: str) -> subprocess.Popen:
    env = hub.environment(LC_ALL="C", **variables)
    return data_kit.start("data", "download", "--root", root, *args, env=env)


def call(hub, root: Path, *args: object, code: int = 0, **variables: str) -> tuple[str, str]:
    """What a call says on stdout and stderr; its exit code is checked."""
    process = start(hub, root, "--train-shards", 2, *args, **variables)
    said = process.communicate(timeout=60)
    assert process.returncode == code, said
    return said


def refused(hub, root: Path, *args: object, **variables: str) -> str:
    """The last line of a call that is refused."""
    return data_kit.refused(call(hub, root, *args, code=3, **variables)[1])


def check_whole(root: Path, train_shards: int = 2, files: dict | None = None) -> None:
    """Exactly what was asked for is there, byte for byte, and nothing else."""
    kept = re.compile(rf"datasets/({DATA}/.*(train_00000[0-{train_shards - 1}]|val_\d+)\.bin|tokenizers/.*)")
    published = (files or FILES).items()
    expected = {path.removeprefix("datasets/"): data for path, data in published if kept.fullmatch(path)}
    ours = {f"{DATA}/source.json", "datasets/.download.lock"}
    assert {name: data for name, data in contents(root).items() if name not in ours} == expected


def check_goes_on(hub, root: Path, **variables: str) -> None:
    """With the trouble over, the same call completes."""
    hub.faults.clear()
    call(hub, root, **variables)
    check_whole(root)


# --- what is wanted --------------------------------------------------------------------------------------


def test_brings_what_was_published_and_names_the_command_that_trains(hub, tmp_path):
    """At the commit that the revision meant first; to a folder with a name in another script, too."""

    def move():
        hub.commit(REPO_ID, {path: data + b"\0\0" for path, data in FILES.items()})

    hub.fault("GET .*manifest.json", times=1, before=move)
    root = tmp_path / "données 数据"
    out, err = call(hub, root)
    assert err == ""
    check_whole(root)
    script = os.path.relpath(helpers.ROOT / "train_gpt.py")
    words = shlex.split(out.splitlines()[-1], posix=True)
    assert words[0] == "VOCAB_SIZE=1024" and words[-1] == script
    assert hub.head[:12] in out
    assert {r.split("/resolve/")[1][:40] for r in hub.requests if "/resolve/" in r} == {hub.head}
    assert len(hub.fetched()) == len(set(hub.fetched())) == 6  # each file once, and the manifest


def test_a_damaged_file_is_fetched_again(hub, tmp_path):
    call(hub, tmp_path)
    since = len(hub.requests)
    assert "nothing to download: all 5 files are there" in call(hub, tmp_path)[0]
    assert hub.fetched("bin|model", since) == []
    cut, flipped = (tmp_path / DATA / f"fineweb_{name}.bin" for name in ("train_000001", "val_000000"))
    cut.write_bytes(cut.read_bytes()[:-2])
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    said = call(hub, tmp_path)[1]
    assert f"{cut}: 7022 bytes, expected 7024: it is fetched again" in said
    assert f"{flipped}: checksum is not " in said
    assert sorted(hub.fetched("bin$", since)) == [cut.name, flipped.name]
    check_whole(tmp_path)


def test_any_number_of_shards_and_more_later(hub, tmp_path):
    call(hub, tmp_path, "--train-shards", 0)
    assert sorted(path.name[8:18] for path in tmp_path.rglob("*.bin")) == ["val_000000", "val_000001"]
    since = len(hub.requests)
    call(hub, tmp_path, "--train-shards", 4)
    assert sorted(hub.fetched("bin$", since)) == [f"fineweb_train_00000{i}.bin" for i in range(4)]
    assert "--train-shards 4 or fewer" in refused(hub, tmp_path, "--train-shards", 80)
    usual = start(hub, tmp_path / "usual")
    assert usual.wait(60) == 0, usual.stderr.read()
    for root in (tmp_path / "usual", tmp_path):
        check_whole(root, train_shards=4)
        shutil.rmtree(root)


def test_releases_do_not_mix(hub, tmp_path):
    """Another repo, or the branch as it is today: the line has the command that goes on, or starts anew."""
    files = published(tokens=50, path=None, stats=None)
    commit = hub.commit("me/mine", files, ref="v1.0/small")
    call(hub, tmp_path, "--repo-id", "me/mine", "--revision", "v1.0/small")
    check_whole(tmp_path, files=files)
    hub.commit("me/mine", FILES, ref="v1.0/small")
    for words in ((), ("--repo-id", "me/mine", "--revision", "v1.0/small")):
        line = refused(hub, tmp_path, *words)
        assert "--root" in line and line.endswith(f"rm -r {tmp_path / DATA}")
        options = shlex.split(re.search(rf"--repo-id me/mine --revision {commit}", line)[0])
    assert "nothing to download" in call(hub, tmp_path, *options)[0]


def test_what_this_program_did_not_fetch_is_left_as_it_is(hub, tmp_path):
    tokenizer = tmp_path / TOKENIZER
    tokenizer.parent.mkdir()
    tokenizer.write_bytes(b"mine")
    assert refused(hub, tmp_path).endswith(f"rm {tokenizer}")
    tokenizer.unlink()
    (tmp_path / DATA).mkdir(parents=True)
    for text in (None, "{", '{"repo_id": 1}'):
        if text:
            (tmp_path / DATA / "source.json").write_text(text)
        assert refused(hub, tmp_path).endswith(f"rm -r {tmp_path / DATA}")
    assert not hub.fetched("bin|model")


# --- a hub that does not answer, or says no --------------------------------------------------------------


def test_a_hub_that_does_not_answer(hub, tmp_path):
    for url in NOWHERE, "http://no.such.host.invalid":
        line = refused(hub, tmp_path, HF_ENDPOINT=url)
        assert url in line and "HF_ENDPOINT" in line and "same command again" in line
    assert "HF_HUB_OFFLINE" in refused(hub, tmp_path, HF_HUB_OFFLINE="1")
    for body in b"<html>Pay for this network</html>", b"[]", b'{"id": "a", "sha": "b", "siblings": 1}':
        hub.fault("/api/datasets/", times=1, body=lambda _, body=body: body)
        assert "does not answer as a Hugging Face hub does" in refused(hub, tmp_path)
    hub.fault("/api/datasets/", times=1, status=503)
    assert "HTTP 503" in refused(hub, tmp_path)
    assert not list(tmp_path.glob("datasets"))


def test_a_hub_that_says_no(hub, tmp_path):
    """To an unknown repo, revision or variant, and where the token may not read."""
    line = refused(hub, tmp_path, "--repo-id", "no/body")
    assert "HTTP 401" in line and "set HF_TOKEN" in line and "--repo-id no/body" in line
    assert "no revision 'v9'" in refused(hub, tmp_path, "--revision", "v9")
    assert "fineweb10B_sp1024, fineweb10B_sp4096" in refused(hub, tmp_path, "--variant", "sp٩")
    hub.commit(REPO_ID, published(name="fineweb100B_sp4096"))
    assert "more than one" in refused(hub, tmp_path, "--variant", "sp4096")
    hub.commit(REPO_ID, FILES, token="hf_secret")
    assert "set HF_TOKEN" in refused(hub, tmp_path)
    assert "check that your token" in refused(hub, tmp_path, HF_TOKEN="hf_wrong")
    for where in "/api/datasets", SECOND:
        hub.fault(where, times=1, status=403)
        line = refused(hub, tmp_path, HF_TOKEN="hf_secret")
        assert "HTTP 403" in line and "gated" in line
    check_goes_on(hub, tmp_path, HF_TOKEN="hf_secret")


# --- a server or a repo that lies ------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"dies_after": 2500}, {"body": lambda data: data[:-1] + b"\xff"}])
def test_a_body_that_is_not_the_file(hub, tmp_path, how):
    """However often the client tries: no dataset is there before all of it is."""
    hub.fault(SECOND, **how)
    line = refused(hub, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert "train_000001.bin: " in line and "run the same command again" in line
    assert not (tmp_path / DATA).exists()
    before = len(hub.requests)
    check_goes_on(hub, tmp_path)
    assert hub.fetched("train|val", since=before) == ["fineweb_train_000001.bin"]


def without(pattern: str) -> dict:
    return {path: data for path, data in FILES.items() if not re.search(pattern, path)}


def with_manifest(text: bytes) -> dict:
    return FILES | {"datasets/manifest.json": text}


def with_shard(name: str, at: int, value: int) -> dict:
    """A shard whose header has another number."""
    path = f"datasets/{DATA}/fineweb_{name}.bin"
    changed = bytearray(FILES[path])
    struct.pack_into("<i", changed, 4 * at, value)
    return FILES | {path: bytes(changed)}


CONTRADICTIONS = {
    "no manifest": (without("manifest"), "has no datasets/manifest.json"),
    "manifest is no JSON": (with_manifest(b"{"), "not as it should be (JSONDecodeError"),
    "manifest of another form": (with_manifest(b"[1]"), "not as it should be"),
    "manifest without tokenizer": (published(tokenizer_name="x"), "not as it should be (KeyError 'x'"),
    "no tokenizer file": (without("model"), f"not as it should be (KeyError 'datasets/{TOKENIZER}'"),
    "tokenizer of bytes": (
        published(tokenizer={"model_path": "tokenizers/b.json"}) | {"datasets/tokenizers/b.json": b"{}"},
        "tokenizers/b.json is no SentencePiece model",
    ),
    "half a validation split": (without("val_000001"), "1 validation shards of 2"),
    "gap in the shards": (without("train_000001"), "missing shards by their names is [1]"),
    "path upwards": (published(path="datasets/../../../etc"), "leads out of the folder"),
    "path of Windows": (published(path="C:\\data"), "leads out of the folder"),
    "no shard": (with_shard("train_000001", 0, 7), "train_000001.bin as published is no shard"),
    "shard with another checksum": (with_shard("train_000003", 11, 7), "crc32"),
}


def test_a_repo_that_contradicts_itself(hub, tmp_path):
    calls = {}
    for name, (files, _) in CONTRADICTIONS.items():
        root = tmp_path / str(len(calls))
        hub.commit(f"case/{root.name}", files)
        calls[name] = start(hub, root, "--repo-id", f"case/{root.name}", "--train-shards", 4)
    for name, process in calls.items():
        line = data_kit.refused(process.communicate(timeout=60)[1])
        assert CONTRADICTIONS[name][1] in line and process.returncode == 3, name
    assert not list(tmp_path.rglob("source.json"))


# --- a disk, a person or another download that stops it --------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """A file system of 100 kB of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("code", NO_LOCK)
def test_a_file_system_without_locks(hub, tmp_path, code):
    """Neither our own lock nor those of the client end a download."""
    root = tmp_path / "root"
    fails = f"lambda *_: exec('raise OSError({code}, os.strerror({code}))')"
    flock = f"import fcntl, os\nfcntl.flock = {fails}\n"
    (tmp_path / "sitecustomize.py").write_text(flock)
    _, said = call(hub, root, PYTHONPATH=str(tmp_path))
    check_whole(root)
    assert "no lock can be had here" in said and said.count("warning: ") <= 2


def test_a_full_disk(hub, disk):
    hub.commit(REPO_ID, published(tokens=20000))
    assert "bytes to come" in (line := refused(hub, disk)) and "make room" in line
    assert hub.fetched() == ["manifest.json"]
    hub.commit(REPO_ID, FILES)

    def fill():
        with open(disk / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
            while True:
                ballast.write(bytes(4096))

    hub.fault(SECOND, times=1, before=fill)
    line = refused(hub, disk)
    assert "No space left on device" in line and "make room" in line
    (disk / "ballast").unlink()
    check_goes_on(hub, disk)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once(hub, tmp_path, number):
    hub.fault(SECOND, times=1, stalls_after=2500)
    process = start(hub, tmp_path, "--train-shards", 2)
    while process.poll() is None and "fineweb_train_000001.bin" not in hub.fetched():
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=5)  # although the connection stalls
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted: run the same command again to go on"
    check_goes_on(hub, tmp_path)


def test_kill_at_any_moment(hub, tmp_path):
    """The dataset is not there, or it is whole; a kill while it grows leaves whole shards without a gap."""
    chance = random.Random(1)
    hub.fault("GET", before=lambda: time.sleep(0.05))
    for wanted in (1, 1, 1, 4, 4, 4):
        process = start(hub, tmp_path, "--train-shards", wanted)
        try:
            process.wait(chance.uniform(0.5, 1.3))
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        found = [*(tmp_path / DATA).glob("*.bin")]
        for path in found:
            assert path.read_bytes() == FILES[f"datasets/{path.relative_to(tmp_path)}"]
        val, train = shards.by_split(found)
        if (tmp_path / DATA).exists():
            numbers = [shards.parse_name(path)[2] for path in train]
            assert (len(val), numbers) == (2, list(range(max(1, len(train)))))
    hub.faults.clear()
    call(hub, tmp_path, "--train-shards", 4)
    check_whole(tmp_path, train_shards=4)


def test_two_downloads_at_once_into_the_same_folder(hub, tmp_path):
    """The second waits for the first, which the server holds up until then."""
    both_are_there = threading.Event()
    hub.fault("GET .*bin", before=lambda: both_are_there.wait(60))
    first = start(hub, tmp_path, "--train-shards", 2)
    while first.poll() is None and not hub.fetched("bin$"):
        time.sleep(0.01)
    second = start(hub, tmp_path, "--train-shards", 2)
    assert "is under way: waiting for it to end" in second.stderr.readline()
    both_are_there.set()
    said = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], said
    assert ["nothing to download" in out for out in said] == [False, True]
    check_whole(tmp_path)
    assert len(hub.fetched("bin$")) == 4
