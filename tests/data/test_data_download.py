"""data.download with the real hub client against tests/kit/hub_server.py.

Each misfortune is one clear line, and a second call goes on.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pty
import random
import re
import shlex
import signal
import socket
import struct
import subprocess
import tempfile
import termios
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from data import shards
from tests.kit import data_kit
from tests.kit.helpers import ROOT
from tests.kit.hub_server import HubServer

pytestmark = pytest.mark.slow

REPO_ID = "willdepueoai/parameter-golf"
DATA = "datasets/fineweb10B_sp1024"
TOKENIZER = "tokenizers/fineweb_1024_bpe.model"
SECOND = "GET /cdn/{}/.*train_000001"  # the content of a repo's second training shard


# --- a published repo, and calls of the script -----------------------------------------------------------


def shard(seed: int, tokens: int = 3000, extended: bool = False) -> bytes:
    payload = np.random.default_rng(seed).integers(0, 1024, tokens, dtype=np.uint16).astype("<u2").tobytes()
    legacy = np.array([20240520, 1, tokens] + [0] * 253, "<i4").tobytes()
    header = shards.Header(tokens, vocab_size=1024, bos_id=1, max_id=1023, crc32=zlib.crc32(payload))
    return (shards.pack(header) if extended else legacy) + payload


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
    model = {
        "name": "sp_bpe_1024",
        "kind": "sentencepiece_bpe",
        "vocab_size": 1024,
        "model_path": TOKENIZER,
        "vocab_path": "tokenizers/fineweb_1024_bpe.vocab",
    } | (tokenizer or {})
    return json.dumps({"datasets": [ours, other], "tokenizers": [model]}).encode()


def published(tokens: int = 3000, **changes) -> dict[str, bytes]:
    """Repo files: 4 training and 2 validation shards, one of them with the extended header."""
    files = {f"{DATA}/fineweb_train_{i:06d}.bin": shard(i, tokens, extended=i == 3) for i in range(4)}
    files |= {f"{DATA}/fineweb_val_{i:06d}.bin": shard(100 + i, tokens) for i in range(2)}
    files |= {
        TOKENIZER: b"\x0amodel" * 500,
        "tokenizers/fineweb_1024_bpe.vocab": b"<unk>\t0\n",
        "manifest.json": manifest(**changes),
    }
    return {f"datasets/{path}": data for path, data in files.items()} | {"README.md": b"# parameter golf"}


@pytest.fixture(scope="module")
def server():
    with HubServer() as server:
        yield server
    for process in CALLERS.values():
        process.kill()
        process.communicate()


@pytest.fixture
def hub(server):
    server.reset()
    server.files = published()
    server.head = server.commit(REPO_ID, server.files)
    yield server
    server.closing.set()


def environment(url: str, **variables) -> dict[str, str]:
    home = str(Path(tempfile.gettempdir(), "no_huggingface_here"))
    return {"HF_ENDPOINT": url, "HF_HOME": home, "HF_TOKEN": "", "NO_PROXY": "*"} | variables


def start(hub, root: Path, *args, variables: dict | None = None, **options) -> subprocess.Popen:
    """A call as a process of its own, for tests that send it signals or look at several at a time."""
    argv = ["--root", root, "--retries", 1, "--train-shards", 2, *args]
    return data_kit.start("data.download", *argv, env=environment(hub.url, **variables or {}), **options)


CALLERS: dict[str, subprocess.Popen] = {}  # by the environment: the client reads it when it is imported


def call_each(environ: dict[str, str], calls: list[list[str]]) -> list[subprocess.CompletedProcess]:
    """The results of calls with these arguments, eight at a time."""
    key = json.dumps(environ)
    if key not in CALLERS:
        CALLERS[key] = data_kit.start("tests.kit.hub_calls", env=environ, stdin=subprocess.PIPE, stderr=None)
    process = CALLERS[key]
    process.stdin.write(json.dumps(calls) + "\n")
    process.stdin.flush()
    results = json.loads(process.stdout.readline())
    return [subprocess.CompletedProcess(argv, *result) for argv, result in zip(calls, results)]


def call(hub, root: Path, *args, **variables) -> subprocess.CompletedProcess:
    url = hub if isinstance(hub, str) else hub.url
    argv = ["--root", root, "--retries", 1, "--train-shards", 2, *args]
    (result,) = call_each(environment(url, **variables), [list(map(str, argv))])
    return result


def call_all(hub, tmp_path: Path, number: int, *args, **variables) -> list[subprocess.CompletedProcess]:
    """A call for each case i, of repo case/i into tmp_path/i."""
    options = ["--retries", "1", "--train-shards", "2", *map(str, args)]
    calls = [["--repo-id", f"case/{i}", "--root", str(tmp_path / str(i)), *options] for i in range(number)]
    return call_each(environment(hub.url, **variables), calls)


def commit_all(hub, number: int) -> range:
    """The usual files in the repos case/0, case/1, ..."""
    for i in range(number):
        hub.commit(f"case/{i}", hub.files)
    return range(number)


def check_whole(hub, root: Path, train_shards: int = 2, files: dict | None = None) -> None:
    """Exactly what was asked for is there, byte for byte, and nothing that is half-written."""
    kept = re.compile(rf"datasets/({DATA}/.*(train_00000[0-{train_shards - 1}]|val_\d+)\.bin|tokenizers/.*)")
    expected = {
        path.removeprefix("datasets/"): data
        for path, data in (files or hub.files).items()
        if kept.fullmatch(path)
    }
    found = {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name not in ("source.json", ".download.lock")
    }
    assert sorted(found) == sorted(expected)
    assert found == expected


def check_refused(result, *words: str) -> str:
    """Exit code 3, and a last line that has all the words."""
    assert result.returncode == 3, result
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ") and "Traceback" not in result.stderr, result.stderr
    for word in words:
        assert word in line
    return line


def whole_files(root: Path) -> set[str]:
    return {path.name for path in root.rglob("fineweb_*.*") if path.parent.name != ".partial"}


def check_goes_on(hub, root: Path, *args, **variables) -> subprocess.CompletedProcess:
    """With the trouble over, the same call completes and asks for nothing that was whole."""
    whole, before = whole_files(root), len(hub.fetched())
    result = call(hub, root, *args, **variables)
    assert result.returncode == 0, result
    check_whole(hub, root)
    assert not whole & set(hub.fetched()[before:])
    return result


def check_all_go_on(hub, tmp_path: Path, number: int, *args, **variables) -> list:
    whole, before = [whole_files(tmp_path / str(i)) for i in range(number)], len(hub.requests)
    results = call_all(hub, tmp_path, number, *args, **variables)
    for i, result in enumerate(results):
        assert result.returncode == 0, result
        check_whole(hub, tmp_path / str(i))
        assert not whole[i] & set(hub.fetched(since=before, repo_id=f"case/{i}"))
    return results


def of_content(hub, where: str) -> list:
    """The requests for the content of a file in LFS."""
    return [r for r in hub.requests if re.search(where, f"GET {r.path}") and "/cdn/" in r.path]


# --- what is wanted --------------------------------------------------------------------------------------


def test_brings_what_was_published_and_names_the_command_that_trains(hub, tmp_path):
    root = tmp_path / "data"
    result = call(hub, root)
    assert result.returncode == 0 and result.stderr == "", result
    check_whole(hub, root)
    script = os.path.relpath(ROOT / "train_gpt.py")
    script = ROOT / "train_gpt.py" if script.startswith("..") else script
    assert (
        result.stdout.splitlines()[-1]
        == f"VOCAB_SIZE=1024 DATA_PATH={root}/{DATA} TOKENIZER_PATH={root}/{TOKENIZER} python {script}"
    )
    assert hub.head[:12] in result.stdout
    assert len(hub.fetched()) == len(set(hub.fetched())) == 7  # each file once, and the manifest


def test_asks_for_every_file_at_the_commit_that_the_revision_meant_first(hub, tmp_path):
    def move():
        hub.commit(REPO_ID, {path: data + b"\0\0" for path, data in hub.files.items()})

    hub.fault("GET .*manifest.json", times=1, before=move)
    assert call(hub, tmp_path).returncode == 0
    check_whole(hub, tmp_path)
    assert {r.path.split("/resolve/")[1][:40] for r in hub.requests if "/resolve/" in r.path} == {hub.head}


def test_second_call_downloads_nothing_and_says_so(hub, tmp_path):
    call(hub, tmp_path)
    before = len(hub.fetched())
    result = call(hub, tmp_path)
    assert result.returncode == 0 and "nothing to download: all 6 files are there" in result.stdout
    assert hub.fetched()[before:] == ["manifest.json"]
    assert "checksums are right" in call(hub, tmp_path, "--verify").stdout


def test_a_damaged_file_is_fetched_again(hub, tmp_path):
    spoils = [lambda data: data[:-2], lambda data: data[:-1] + bytes([data[-1] ^ 1])]
    cases = commit_all(hub, len(spoils))
    call_all(hub, tmp_path, len(cases))
    paths = [tmp_path / str(i) / DATA / "fineweb_train_000001.bin" for i in cases]
    for path, spoil in zip(paths, spoils):
        path.write_bytes(spoil(path.read_bytes()))
    before = len(hub.requests)
    for i, result in enumerate(call_all(hub, tmp_path, len(cases), "--verify")):
        assert f"{paths[i]}: " in result.stderr and "fetched again" in result.stderr
        assert hub.fetched(since=before, repo_id=f"case/{i}") == ["manifest.json", "fineweb_train_000001.bin"]
        check_whole(hub, tmp_path / str(i))


def test_any_number_of_shards_and_more_later(hub, tmp_path):
    assert call(hub, tmp_path, "--train-shards", 0).returncode == 0
    assert sorted(path.name[8:18] for path in tmp_path.rglob("*.bin")) == ["val_000000", "val_000001"]
    before = len(hub.fetched())
    assert call(hub, tmp_path, "--train-shards", 4).returncode == 0
    assert sorted(hub.fetched()[before:])[:-1] == [f"fineweb_train_00000{i}.bin" for i in range(4)]
    check_whole(hub, tmp_path, train_shards=4)
    line = check_refused(call(hub, tmp_path, "--train-shards", 80), "has 4 training shards", "not 80")
    assert "--train-shards 4 or fewer" in line


def test_unknown_or_ambiguous_variant(hub, tmp_path):
    check_refused(call(hub, tmp_path, "--variant", "sp9999"), "fineweb10B_sp1024, fineweb10B_sp4096")
    hub.commit(REPO_ID, published(name="fineweb100B_sp4096"))
    check_refused(call(hub, tmp_path, "--variant", "sp4096"), "fineweb100B_sp4096, fineweb10B_sp4096")
    assert not list(tmp_path.glob("datasets"))


def test_other_repo_and_revision(hub, tmp_path):
    files = published(tokens=50)
    commit = hub.commit("me/mine", files, ref="v1.0/small")
    assert call(hub, tmp_path, "--repo-id", "me/mine", "--revision", "v1.0/small").returncode == 0
    check_whole(hub, tmp_path, files=files)
    record = json.loads((tmp_path / DATA / "source.json").read_text())
    assert (record["repo_id"], record["commit"], record["revision"]) == ("me/mine", commit, "v1.0/small")


def test_several_files_at_a_time_and_the_validation_split_last(hub, tmp_path):
    hub.fault("GET /cdn/.*(train|val)", before=lambda: time.sleep(0.5))
    assert call(hub, tmp_path, "--train-shards", 4, "--workers", 3).returncode == 0
    first, second, *_ = of_content(hub, "train")
    assert second.time - first.time < 0.4  # the second did not wait for the first
    assert hub.most_active <= 3
    assert [name[8:11] for name in hub.fetched(r"fineweb_\w+.bin")] == 4 * ["tra"] + 2 * ["val"]


@pytest.mark.parametrize("differences", [{"lists_sizes": False}, {"lists_siblings": False, "page": 3}])
def test_a_mirror_that_lists_less(hub, tmp_path, differences):
    vars(hub).update(differences)
    assert call(hub, tmp_path).returncode == 0
    check_whole(hub, tmp_path)


@pytest.mark.parametrize(
    "dataset",
    [
        {"train_glob": f"{DATA}/fineweb_train_*.bin", "val_glob": f"{DATA}/fineweb_val_*.bin"},
        {"path": None, "train_glob": None, "val_glob": None, "stats": None},
    ],
)
def test_manifests_of_other_makers(hub, tmp_path, dataset):
    """Patterns with the folder in them, or no more than the names."""
    hub.files = published(**dataset)
    hub.commit(REPO_ID, hub.files)
    assert call(hub, tmp_path).returncode == 0
    check_whole(hub, tmp_path)


def test_a_mirror_with_etags_of_its_own(hub, tmp_path):
    etags = ["made up", hashlib.sha1(hub.files["datasets/manifest.json"]).hexdigest()]
    for i in commit_all(hub, 2):
        hub.fault(f"case/{i}/resolve/.*manifest", headers={"ETag": f'"{etags[i]}"'})
    check_all_go_on(hub, tmp_path, 2)


def test_a_bar_on_a_terminal_and_none_in_a_file(hub, tmp_path):
    assert "%|" not in call(hub, tmp_path / "file").stderr
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    process = start(hub, tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError as error:  # how Linux ends a terminal
        assert error.errno == 5
    os.close(ours)
    assert process.wait() == 0
    assert b"fineweb10B_sp1024: 100%|" in shown


# --- a hub that does not answer, or says no --------------------------------------------------------------


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_no_network(hub, tmp_path):
    url = closed_port()
    check_refused(call(url, tmp_path), "ConnectError", "2 times", url, "HF_ENDPOINT", "same command again")
    check_goes_on(hub, tmp_path)
    result = call(url, tmp_path, "--retries", 0)  # all is there, so no network is needed
    assert result.returncode == 0 and "nothing to download" in result.stdout
    assert result.stderr.startswith("willdepueoai/parameter-golf at main: ConnectError")
    check_refused(call(url, tmp_path, "--retries", 0, "--train-shards", 3), "ConnectError")
    result = call(url, tmp_path, "--revision", hub.head)  # nor tried for a commit, which cannot move
    assert result.returncode == 0 and result.stderr == ""
    check_whole(hub, tmp_path)


def test_no_hub_at_all(hub, tmp_path):
    check_refused(call(hub, tmp_path, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE")
    for url in "http://no.such.host.invalid", "127.0.0.1:80":
        check_refused(call(url, tmp_path, "--retries", 0), url)
    assert not hub.requests and not list(tmp_path.glob("datasets"))


def test_refusals(hub, tmp_path):
    cases = [(status, where) for status in (401, 403, 404) for where in ("/api/datasets/{}/", SECOND)]
    for i in commit_all(hub, len(cases)):
        status, where = cases[i]
        hub.fault(where.format(f"case/{i}"), times=1, status=status)
    for (status, _), result in zip(cases, call_all(hub, tmp_path, len(cases))):
        check_refused(result, f"HTTP {status}", "HF_TOKEN", "--repo-id")  # asked once
    check_all_go_on(hub, tmp_path, len(cases))


def test_a_private_repo_and_its_token(hub, tmp_path):
    hub.commit(REPO_ID, hub.files, token="hf_secret")
    check_refused(call(hub, tmp_path), "HTTP 401", "set HF_TOKEN")
    check_refused(call(hub, tmp_path, HF_TOKEN="hf_wrong"), "HTTP 401", "your token")
    check_goes_on(hub, tmp_path, HF_TOKEN="hf_secret")
    assert {request.token for request in hub.requests if "/cdn/" in request.path} == {""}


def test_unknown_repo_or_revision_and_a_gated_repo(hub, tmp_path):
    check_refused(call(hub, tmp_path, "--repo-id", "no/body"), "no/body", "--repo-id")
    check_refused(call(hub, tmp_path, "--revision", "v9"), "no revision 'v9'", "--revision")
    hub.fault("/api/datasets", status=403, headers={"X-Error-Code": "GatedRepo"})
    check_refused(call(hub, tmp_path), "gated", "HF_TOKEN")


def test_429_waits_as_long_as_the_hub_asks(hub, tmp_path):
    cases = [("/api/datasets/{}/", {"Retry-After": "2"}), (SECOND, {"RateLimit": '"resolvers";r=0;t=2'})]
    for i in commit_all(hub, 2):
        hub.fault(cases[i][0].format(f"case/{i}"), times=1, status=429, headers=cases[i][1])
    check_all_go_on(hub, tmp_path, 2)
    for i in range(2):
        where = cases[i][0].format(f"case/{i}")
        first, second = [r.time for r in hub.requests if re.search(where, f"{r.method} {r.path}")]
        assert 2 <= second - first < 6


def test_429_that_asks_for_too_long_a_wait(hub, tmp_path):
    headers = [{"Retry-After": "86400"}, {"RateLimit": '"api";r=0;t=86400'}]
    for i in commit_all(hub, 2):
        hub.fault(SECOND.format(f"case/{i}"), times=1, status=429, headers=headers[i])
    for result in call_all(hub, tmp_path, 2):
        check_refused(result, "HTTP 429", "in 86400 s")
    check_all_go_on(hub, tmp_path, 2)


def test_errors_of_the_hub_that_pass(hub, tmp_path):
    cases = [
        ("/api/datasets/{}/", 503),
        ("HEAD .*{}/.*manifest", 520),
        ("GET .*{}/.*manifest", 500),
        (SECOND, 502),
        ("GET /cdn/{}/.*val_000000", 504),
        ("GET /cdn/{}/.*train_000000", 408),
    ]
    for i in commit_all(hub, len(cases)):
        where, status = cases[i]
        hub.fault(where.format(f"case/{i}"), times=1, status=status)
    for (_, status), result in zip(cases, check_all_go_on(hub, tmp_path, len(cases))):
        assert result.stderr.count("trying again in 1 s (1 of 1)") == 1 and f"HTTP {status}" in result.stderr


def test_errors_of_the_hub_that_stay(hub, tmp_path):
    cases = ["/api/datasets/{}/", "{}/resolve.*manifest.json", "/cdn/{}/.*val_000001"]
    for i in commit_all(hub, len(cases)):
        hub.fault(cases[i].format(f"case/{i}"), times=2, status=503)
    for result in call_all(hub, tmp_path, len(cases)):
        check_refused(result, "HTTP 503", "2 times", "same command again")
    check_all_go_on(hub, tmp_path, len(cases))


def test_something_that_is_no_hub(hub, tmp_path):
    bodies = [
        b"<html>Pay for this network</html>",
        b"[]",
        b'{"error": []}',
        b"null",
        b"\xff",
        b'{"id": "a", "sha": null}',
        b'{"id": "a", "sha": "b", "siblings": 1}',
    ]
    for i in commit_all(hub, len(bodies)):
        hub.fault(f"/api/datasets/case/{i}/", body=lambda _, i=i: bodies[i])
    for result in call_all(hub, tmp_path, len(bodies)):
        check_refused(result, "does not answer as a Hugging Face hub does", "HF_ENDPOINT")


# --- a connection or a server that breaks off, stalls or lies --------------------------------------------

BROKEN = {
    "dies": {"dies_after": 2500},
    "dies before the answer": {"hangs_up": True},
    "reset": {"resets_after": 2500},
    "stalls": {"stalls_after": 2500},
    "stalls at once": {"stalls_after": 0},
    "trickles": {"drips": 0.05},
    "cut short, and says so": {"ends_after": 2500},
    "cut short, without a length": {
        "ends_after": 2500,
        "headers": {"Connection": "close"},
        "without": ("Content-Length",),
    },
    "wrong bytes": {"body": lambda data: data[:-1] + b"\xff"},
    "pointer for file": {"body": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"},
    "page of a portal": {"body": lambda data: b"<html></html>", "headers": {"Content-Type": "text/html"}},
    "too long": {"body": lambda data: data + b"\0\0"},
    "endless": {"endless": True},
    "empty": {"body": lambda data: b""},
    "not the compression it says": {"headers": {"Content-Encoding": "gzip"}},
    "redirected in circles": {"status": 302, "headers": {"Location": "train_000001"}},
}


def test_a_body_that_is_not_the_file(hub, tmp_path):
    """An error, and no file under its name; then the second call meets the fault once more, and completes."""
    faults = [hub.fault(SECOND.format(f"case/{i}"), **how) for i, how in enumerate(BROKEN.values())]
    number = len(commit_all(hub, len(BROKEN)))
    for i, result in enumerate(call_all(hub, tmp_path, number, "--retries", 0, HF_HUB_DOWNLOAD_TIMEOUT="2")):
        check_refused(result, "train_000001.bin: ", "run the same command again")
        names = {path.name for path in (tmp_path / str(i) / DATA).glob("*.bin")}
        assert names <= {"fineweb_train_000000.bin"}, result  # no validation split: nothing to train on
        faults[i].times = 20 if faults[i].status else 1  # the client follows so many redirects
    for result in check_all_go_on(hub, tmp_path, number, HF_HUB_DOWNLOAD_TIMEOUT="2"):
        assert result.stderr.count("trying again") == 1, result


def test_goes_on_where_the_body_ended(hub, tmp_path):
    """Within a call and from one call to the next; a server that knows no ranges sends all of it again."""
    for i in commit_all(hub, 2):
        hub.fault(SECOND.format(f"case/{i}"), times=2, dies_after=2500)
        hub.fault(SECOND.format(f"case/{i}"), ignores_range=i == 1)
    for result in call_all(hub, tmp_path, 2):
        check_refused(result, "train_000001", "2 times")
    check_all_go_on(hub, tmp_path, 2)
    for i in range(2):
        ranges = [request.range for request in of_content(hub, SECOND.format(f"case/{i}"))]
        assert ranges == ["", "bytes=2500-", "bytes=5000-"]


def test_a_part_that_the_server_does_not_continue(hub, tmp_path):
    """It is dropped only where nothing can follow it."""
    cases = [
        ({"status": 416}, ""),
        ({"headers": {"Content-Range": "bytes 0-7023/7024"}}, "bytes=2500-"),
        ({"ignores_range": True, "body": lambda data: b"<html></html>"}, "bytes=2500-"),
    ]
    for i in commit_all(hub, len(cases)):
        hub.fault(SECOND.format(f"case/{i}"), times=1, dies_after=2500)
        hub.fault(SECOND.format(f"case/{i}"), times=1, **cases[i][0])
    check_all_go_on(hub, tmp_path, len(cases), "--retries", 2)
    for i, (_, asked_next) in enumerate(cases):
        ranges = [request.range for request in of_content(hub, SECOND.format(f"case/{i}"))]
        assert ranges == ["", "bytes=2500-", asked_next]


def test_a_spoilt_part_does_not_stay(hub, tmp_path):
    hub.fault(SECOND.format(REPO_ID), times=1, dies_after=2500)
    check_refused(call(hub, tmp_path, "--retries", 0))
    (part,) = (tmp_path / DATA / ".partial").glob("*train_000001*")
    part.write_bytes(b"x" * 100)
    assert "checksum is not" in check_goes_on(hub, tmp_path).stderr


def test_a_bad_line_gets_there_in_the_end(hub, tmp_path):
    """Tries count anew after each MiB: three breaks with one retry."""
    hub.files = published(tokens=2 << 20)
    hub.commit(REPO_ID, hub.files)
    hub.fault("GET /cdn/.*train_000000", times=3, resets_after=(1 << 20) + 5000)
    assert call(hub, tmp_path, "--train-shards", 1).returncode == 0
    check_whole(hub, tmp_path, train_shards=1)
    assert len(of_content(hub, "train_000000")) == 4


def test_a_hub_that_stalls(hub, tmp_path):
    cases = ["/api/datasets/{}/revision", "HEAD .*{}/.*manifest", "GET .*{}/.*manifest"]
    limits = {"HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2"}
    for i in commit_all(hub, len(cases)):
        hub.fault(cases[i].format(f"case/{i}"), times=1, before=lambda: hub.closing.wait(60))
    for result in call_all(hub, tmp_path, len(cases), "--retries", 0, **limits):
        check_refused(result, "ReadTimeout")
    check_all_go_on(hub, tmp_path, len(cases), **limits)


def test_a_hub_that_trickles_for_ever_or_never_ends(hub, tmp_path):
    """Where the client's time limit begins anew with each byte, and where it would keep all of an answer."""
    cases = [
        ("/api/datasets/{}/", {"drips": 0.05}),
        (SECOND, {"drips": 0.2, "drips_headers": True}),
        ("/api/datasets/{}/", {"endless": True}),
        ("{}/resolve/.*train_000001", {"status": 302, "headers": {"Location": "x"}, "endless": True}),
    ]
    faults = [hub.fault(cases[i][0].format(f"case/{i}"), **cases[i][1]) for i in commit_all(hub, len(cases))]
    limits = {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}
    options = ["--retries", 0, "--repo-id"]
    calls = [
        start(hub, tmp_path / f"{i}", *options, f"case/{i}", variables=limits) for i in range(len(cases))
    ]
    for i, process in enumerate(calls):
        out, err = process.communicate(timeout=60)
        result = subprocess.CompletedProcess(process.args, process.returncode, out, err)
        words = "no answer that ends within 6 s" if i < 2 else "answer of more than"
        check_refused(result, words, "HF_ENDPOINT")
        faults[i].times = 0
    check_all_go_on(hub, tmp_path, len(cases))


def test_a_mirror_that_stalls_at_its_tree(hub, tmp_path):
    hub.lists_siblings = False
    hub.fault("/tree/", times=1, stalls_after=5)  # where the client itself has no time limit
    check_goes_on(hub, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="2")


# --- a repo that contradicts itself ----------------------------------------------------------------------


def without(pattern: str, **changes) -> dict:
    return {path: data for path, data in published(**changes).items() if not re.search(pattern, path)}


def with_manifest(text: bytes) -> dict:
    return published() | {"datasets/manifest.json": text}


def of_files(**entry) -> dict:
    return published(files=[entry])


CONTRADICTIONS = {
    "no manifest": (without("manifest"), "has no datasets/manifest.json"),
    "nothing": ({"README.md": b""}, "has no datasets/manifest.json"),
    "manifest is no JSON": (with_manifest(b"{"), "not JSON"),
    "manifest of another form": (with_manifest(b"[1]"), "not as it should be"),
    "manifest of numbers": (published(path=7), "not as it should be"),
    "manifest without variants": (with_manifest(b'{"datasets": []}'), "none at all"),
    "manifest without tokenizer": (published(tokenizer_name="x"), "lacks the tokenizer x"),
    "no tokenizer file": (without("model"), "lacks the file of the tokenizer"),
    "half a validation split": (without("val_000001"), "1 validation shards of 2"),
    "no validation split": (without("val", stats={}), "0 validation shards of 1"),
    "gap in the shards": (without("train_000001"), "expected number 1"),
    "stale checksum": (of_files(name="fineweb_train_000001.bin", sha256="0" * 64), "0" * 64),
    "stale size": (of_files(name="fineweb_train_000001.bin", size=5), "promises 5 bytes"),
    "stale count": (of_files(path="x/fineweb_val_000000.bin", tokens=5), "promises 1034 bytes"),
    "stale tokenizer": (published(tokenizer={"sha256": "1" * 64}), "1" * 64),
    "path upwards": (published(path="datasets/../../../etc"), "leads out of the folder"),
    "absolute path": (published(path="/etc"), "leads out of the folder"),
    "tokenizer upwards": (published(tokenizer={"model_path": "../train_gpt.py"}), "leads out of the folder"),
    "path of Windows": (published(path="C:\\data"), "leads out of the folder"),
}


def test_a_repo_that_contradicts_itself(hub, tmp_path):
    for i, (files, _) in enumerate(CONTRADICTIONS.values()):
        hub.commit(f"case/{i}", files)
    results = call_all(hub, tmp_path, len(CONTRADICTIONS))
    for result, (_, words) in zip(results, CONTRADICTIONS.values()):
        check_refused(result, words)
    assert {path.name for path in tmp_path.iterdir()} <= {"hf"}


def with_int(at: int, value: int):
    def spoil(data: bytes) -> bytes:
        ints = np.frombuffer(data, "<i4", 256).copy()
        ints[at] = value
        return ints.tobytes() + data[1024:]

    return spoil


def test_a_published_file_that_is_no_shard(hub, tmp_path):
    cases = [
        ("train_000001", with_int(0, 20240521), "magic"),
        ("val_000000", with_int(1, 2), "version"),
        ("train_000000", with_int(2, 2999), "expected 7022"),
        ("train_000000", lambda data: data + b"\0", "7025 bytes"),
        ("train_000001", lambda data: data[:500], "500 bytes"),
        ("train_000001", lambda data: b"", "0 bytes"),
        ("train_000003", with_int(11, 7), "crc32"),
    ]
    for i, (name, spoil, _) in enumerate(cases):
        path = f"datasets/{DATA}/fineweb_{name}.bin"
        hub.commit(f"case/{i}", hub.files | {path: spoil(hub.files[path])})
    for i, result in enumerate(call_all(hub, tmp_path, len(cases), "--train-shards", 4)):
        name, _, words = cases[i]
        check_refused(result, name, words)
        assert not list((tmp_path / str(i)).rglob(f"*{name}*"))


def test_a_mirror_that_answers_for_another_commit(hub, tmp_path):
    hub.fault("HEAD .*manifest", headers={"X-Repo-Commit": "f" * 40})
    check_refused(call(hub, tmp_path), "f" * 40, hub.head)


# --- a folder that holds something else ------------------------------------------------------------------


def test_a_folder_of_another_commit_is_refused_and_goes_on_with_its_own(hub, tmp_path):
    old = hub.head
    call(hub, tmp_path, "--train-shards", 1)
    hub.commit(REPO_ID, published(tokens=60))
    line = check_refused(call(hub, tmp_path), old[:12], "--root", f"rm -r {tmp_path / DATA}")
    check_goes_on(hub, tmp_path, *shlex.split(re.search(rf"--repo-id \S+ --revision {old}", line)[0]))


def test_a_folder_of_another_repo_is_refused(hub, tmp_path):
    hub.commit("me/mine", published(tokens=60))
    call(hub, tmp_path, "--repo-id", "me/mine")
    check_refused(call(hub, tmp_path), "me/mine", f"{REPO_ID}@", "--root")


def test_files_of_unknown_origin_are_taken_over_if_they_are_the_same(hub, tmp_path):
    (tmp_path / DATA).mkdir(parents=True)
    path = tmp_path / DATA / "fineweb_train_000000.bin"
    path.write_bytes(shard(77))
    check_refused(call(hub, tmp_path), str(path), "checksum")
    path.write_bytes(hub.files[f"datasets/{DATA}/{path.name}"])
    check_goes_on(hub, tmp_path)
    stranger = path.with_name("mine_train_000000.bin")
    stranger.write_bytes(shard(78))
    check_refused(call(hub, tmp_path), stranger.name, "two sets")


def test_a_record_that_is_damaged(hub, tmp_path):
    call(hub, tmp_path)
    (tmp_path / DATA / "source.json").write_text("{")
    check_refused(call(hub, tmp_path), "source.json", f"rm -r {tmp_path / DATA}")


# --- a disk or a person that stops it --------------------------------------------------------------------


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


def test_a_disk_that_is_too_small_is_told_before_the_download(hub, disk):
    hub.commit(REPO_ID, published(tokens=20000))
    check_refused(call(hub, disk), "bytes to come", "free", "make room")
    assert hub.fetched() == ["manifest.json"]


def test_a_disk_that_fills_up(hub, disk):
    def fill():
        with open(disk / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
            while True:
                ballast.write(bytes(4096))

    hub.fault(SECOND.format(REPO_ID), times=1, before=fill)
    check_refused(call(hub, disk, "--workers", 1), "No space left on device", "make room")
    (disk / "ballast").unlink()
    check_goes_on(hub, disk)


def test_a_disk_that_cannot_be_written(hub, disk):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    check_refused(call(hub, disk), "Read-only file system", "--root")
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    check_goes_on(hub, disk)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert "nothing to download" in check_goes_on(hub, disk).stdout


def test_a_root_that_is_a_file(hub, tmp_path):
    (tmp_path / "data").write_text("")
    check_refused(call(hub, tmp_path / "data"), str(tmp_path / "data"), "--root")


def test_ctrl_c(hub, tmp_path):
    hub.fault(SECOND.format(REPO_ID), times=1, stalls_after=2500)
    process = start(hub, tmp_path)
    while process.poll() is None and not (
        of_content(hub, "train_000001") and (tmp_path / DATA / "fineweb_train_000000.bin").exists()
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=5)  # at once, although the connection stalls
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted: run the same command again to go on"
    check_goes_on(hub, tmp_path)


def test_kill_at_any_moment(hub, tmp_path):
    """Whatever has its name is whole, and the last call completes the set."""
    chance = random.Random(1)
    hub.fault("GET", before=lambda: time.sleep(0.05))
    for _ in range(4):
        process = start(hub, tmp_path, "--workers", 2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0.4, 1.2))
        process.kill()
        process.communicate()
        for path in tmp_path.rglob("*.bin"):
            assert path.read_bytes() == hub.files[f"datasets/{path.relative_to(tmp_path)}"]
    check_goes_on(hub, tmp_path)


def test_two_downloads_at_once_into_the_same_folder(hub, tmp_path):
    hub.fault("GET /cdn/", before=lambda: time.sleep(0.5))
    both = [start(hub, tmp_path), start(hub, tmp_path)]
    results = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert sorted("waiting for it to end" in err for _, err in results) == [False, True]
    assert sorted("nothing to download" in out for out, _ in results) == [False, True]
    check_whole(hub, tmp_path)
    shards_fetched = hub.fetched("bin$")
    assert len(shards_fetched) == len(set(shards_fetched)) == 4
