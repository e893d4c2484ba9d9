"""What a record's process sees: the options of bubblewrap (bwrap) that build its file system and its rights.

It sees the record's script and artifact, the Python installation and a C++ compiler, all read-only, an empty
/tmp, no network and no other process. What stands in the installed packages of the demo corpus is not there
as text: modules that torch needs are there as bytecode without docstrings, the rest is not.
"""

import atexit
import errno
import functools
import importlib.metadata
import importlib.util
import marshal
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from data.prepare import DEMO_PACKAGES

KEY_CALLS = {  # audit's number of the architecture, then those of add_key, request_key and keyctl
    "x86_64": (0xC000003E, 248, 249, 250),
    "aarch64": (0xC00000B7, 217, 218, 219),
}
VENDORS = {"setuptools"}  # needed by torch.compile, and holds copies of corpus packages
FOREIGN_FOLDERS = {"tests", "benchmarks", "testing"}  # of packages: nothing imports them


@functools.cache
def find() -> str | None:
    """Path of bwrap if it works here, else None."""
    path = shutil.which("bwrap")
    if path is None:
        return None
    room = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    test = [path, *room, "--unshare-pid", "--unshare-net", "--unshare-ipc", "true"]
    return path if subprocess.run(test, capture_output=True).returncode == 0 else None


# --- packages ---------------------------------------------------------------------------------------------


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


CORPUS = {canonical(name) for name in DEMO_PACKAGES}


@functools.cache
def distributions(roots: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions by name that `roots` need, themselves included."""
    found = {}
    todo = list(roots)
    while todo:
        name = canonical(todo.pop())
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform, or optional
        for line in found[name].requires or ():
            if "extra ==" not in line:
                todo.append(re.match(r"[\w.-]+", line)[0])
    return found


def top_level(distribution: importlib.metadata.Distribution) -> set[str]:
    """Names in site-packages that belong to a distribution."""
    return {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}


@functools.cache
def bytecode(name: str) -> Path:
    """A folder with the modules of one distribution as bytecode without docstrings and asserts."""
    folder = Path(tempfile.mkdtemp(prefix="bytegolf-bytecode-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    for file in importlib.metadata.distribution(name).files:
        if len(file.parts) < 2 or FOREIGN_FOLDERS & set(file.parts) or ".." in file.parts:
            continue
        target = folder / Path(*file.parts)
        if file.suffix == ".py":
            text = Path(file.locate()).read_bytes()
            code = compile(text, str(file), "exec", optimize=2, dont_inherit=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            data = importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
            target.with_suffix(".pyc").write_bytes(data)
        elif file.suffix == ".txt" and name in VENDORS:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), target)
    return folder


def packages(imports: Iterable[str], hide_corpus: bool) -> list[str]:
    """Options that put the needed packages into an otherwise empty site-packages."""
    sites = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    hidden = sites | {str(path) for path in Path(sys.base_prefix).glob("lib*/python*/*-packages")}
    options = [part for site in sorted(hidden) for part in ("--tmpfs", site)]
    seen = set()
    for name, distribution in distributions((*imports, "packaging", *VENDORS)).items():
        for top in sorted(top_level(distribution) - seen):
            seen.add(top)
            source = target = distribution.locate_file(top)
            if hide_corpus and name in CORPUS | VENDORS:
                source = bytecode(name) / top
            if source.exists():
                options += ["--ro-bind", str(source), str(target)]
    return options


# --- the system -------------------------------------------------------------------------------------------


def libraries() -> list[Path]:
    """Shared libraries and the compiler's own files: not all of /usr/lib, where anything may be installed."""
    folders = map(Path, ("/usr/lib", "/usr/lib64", "/usr/libexec"))
    real = [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]
    return [
        child
        for folder in real
        for child in sorted(folder.iterdir())
        if child.name.startswith("gcc")
        or child.name.endswith("-linux-gnu")
        or (child.is_file() and ".so" in child.name)
    ]


def bind(path: Path) -> list[str]:
    """Options for a read-only path and folders above it that everybody may pass."""
    if not path.exists():
        return []
    options = []
    for parent in reversed(path.parents):
        options += ["--perms", "0755", "--dir", str(parent)]
    return [*options, "--ro-bind", str(path), str(path)]


def python_folders() -> Iterator[Path]:
    """Folders of the Python installation and of the virtual environment, none within another."""
    prefixes = {Path(os.path.abspath(path)) for path in (sys.base_prefix, sys.prefix)}
    prefixes.add(Path(sysconfig.get_path("stdlib")))
    prefixes.discard(Path("/usr"))  # its parts are chosen by libraries()
    for path in sorted(prefixes):
        if not prefixes & set(path.parents):
            yield path


def system() -> list[str]:
    """Options for libraries, the C++ compiler and Python itself."""
    found = [Path("/usr/bin"), Path("/usr/include"), *libraries(), Path("/etc/ld.so.cache")]
    found += [Path("/etc/alternatives"), Path("/sys/devices/system/cpu"), Path("/sys/devices/system/node")]
    options = [part for path in found for part in bind(path)]
    for path in map(Path, ("/usr/lib64", "/bin", "/sbin", "/lib", "/lib64")):
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.parent == Path("/"):
            options += bind(path)
    return options + [part for path in python_folders() for part in bind(path)]


def devices(device: str) -> list[str]:
    """Options for the GPUs where the record runs on them."""
    paths = sorted(Path("/dev").glob("nvidia*")) if device == "cuda" else []
    return [part for path in paths for part in ("--dev-bind", str(path), str(path))]


def no_keys() -> bytes:
    """A seccomp program (struct sock_filter[]) that refuses the kernel's key rings.

    They outlive a sandbox, so the process that is scored could tell the one that is probed what text it saw.
    Empty where the numbers of the calls are not known.
    """
    if platform.machine() not in KEY_CALLS:
        return b""
    architecture, *calls = KEY_CALLS[platform.machine()]
    load, equal, at_least, result = 0x20, 0x15, 0x35, 0x06
    allow = 0x7FFF0000
    refuse = 0x00050000 | errno.EPERM
    last = len(calls) + 1  # instructions between a comparison and the refusal at the end
    program = [
        (load, 0, 0, 4),
        (equal, 0, last + 2, architecture),
        (load, 0, 0, 0),
        (at_least, last, 0, 0x40000000),  # another architecture's numbers are refused as a whole
    ]
    program += [(equal, last - 1 - i, 0, number) for i, number in enumerate(calls)]
    program += [(result, 0, 0, allow), (result, 0, 0, refuse)]
    return b"".join(struct.pack("<HBBI", *line) for line in program)


# --- the command line -------------------------------------------------------------------------------------


def command(
    stage: Path, imports: Iterable[str], device: str, file_bytes: int, hide_corpus: bool
) -> list[str]:
    """The command line that runs what follows it in a sandbox with the folder `stage` as /record.

    `file_bytes`: of one file, and four times that of all of /tmp.
    """
    rights = ["--cap-drop", "ALL"]
    if os.geteuid() == 0:  # root needs no user namespace; the worker becomes another user at once
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    space = ["--size", str(4 * file_bytes), "--perms", "1777", "--tmpfs"]
    files = ["--proc", "/proc", "--dev", "/dev", *devices(device), *space, "/dev/shm"]
    files += ["--remount-ro", "/dev", *space, "/tmp", *system(), *packages(imports, hide_corpus)]
    files += ["--ro-bind", str(stage), "/record", "--chdir", "/tmp"]
    apart = [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    apart += ["--hostname", "sandbox", "--die-with-parent", "--new-session"]
    return [find(), *files, *apart, *rights]
