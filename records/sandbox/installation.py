"""What a sandbox gets of this machine's installation: Python, the packages of a track and a C++ compiler.

All of it is copied into a file system of its own (bubblewrap.py), so this is a list, and what is not in it is
not there: no tests, no packages that the track does not name, no headers that no compiler needs.

Modules are there as bytecode without docstrings and line numbers. A text of Python sources is scored here, so
sources that a record can read are text that it never paid for. The bytecode is kept in the user's cache
folder: to make that of torch and of Python takes half a minute.
"""

import ast
import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import marshal
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from packaging.requirements import Requirement

from data.corpus import DEMO_PACKAGES, NOT_IMPORTED

CORPUS = {re.sub(r"[-_.]+", "-", name).lower() for name in DEMO_PACKAGES}
# Their names are worth more to a script than it pays to read them; torch runs without them, uncompiled.
NOT_TO_SCORE = {"filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy"}
VENDORS = {"setuptools"}  # needed by torch.compile, and holds copies of corpus packages
NOT_OF_PYTHON = ("test", "tests", "idlelib", "lib2to3", "ensurepip", "pydoc_data", "turtledemo")
NOT_OF_PYTHON += ("__pycache__", "*-packages", "config-*", "*.a")
NOT_OF_PACKAGES = re.compile(r"\.\.|.*\.(pyi|pyc|a)$|torch/bin/(?!torch_shm)|(.*/)?(tests?|benchmarks)/")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")
# torch.compile runs openssl, triton asks ldconfig where libcuda is
PROGRAMS = ("sh", "env", "uname", "prlimit", "setpriv", "openssl", "ldconfig", "as", "ld", "ar", *COMPILERS)
OF_COMPILERS = ("/usr/lib/gcc", "/usr/lib64/gcc", "/usr/libexec/gcc", "/usr/lib/llvm*/lib/clang")
NOT_OF_COMPILERS = ("lto1", "lib?san*", "plugin", "f951", "finclude", "*.mod", "gnat1", "ada*", "d21", "go1")
LIBRARIES = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib")
# what is loaded by name alone, and what a linker needs beside the libraries
LOADED = ("libgcc_s.so*", "libstdc++.so*", "libgomp.so*", "libnss_[fd]*.so*", "libatomic.so*")
LOADED += ("*crt?.o", "libc.so*", "libc_nonshared.a", "libm.*", "libmvec.so*", "libpthread*", "libdl*")
OF_GPUS = ("libcuda.so*", "libnvidia-*.so*")
# Prints where the loader finds a GPU's driver, whose first use makes the files /dev/nvidia* that are missing.
DRIVER = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
driver.cuInit(0)
link = ctypes.POINTER(ctypes.c_char_p)()
ctypes.CDLL(None).dlinfo(ctypes.c_void_p(driver._handle), 2, ctypes.byref(link))
print(link[1].decode())
"""
INCLUDES = ("/usr/include", "/usr/include/*-linux-gnu")
HEADERS = ("asm", "asm-generic", "bits", "c++", "gnu", "linux", "net", "netinet", "sys", "arpa", "rpc")
PROCESSORS = ("online", "possible", "present", "kernel_max", "cpulist", "cpumap", "cache/*/*", "topology/*")

# By paths inside a sandbox: a file outside, bytes, or where a link leads.
Files = dict[str, Path | bytes | str]


def add(files: Files, path: Path) -> Path:
    """Add a file and the links on the way to it, of a folder the links alone; where they lead."""
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            target = files[str(part)] = os.readlink(part)
            return add(files, Path(os.path.normpath(part.parent / target / path.relative_to(part))))
    if path.is_file():
        files[str(path)] = path
    return path


def add_folder(files: Files, folder: Path, without: Iterable[str] = ()) -> None:
    """All below a folder, under its own name; `without`: patterns of names."""
    here = add(files, folder)
    for path in sorted(here.iterdir()) if here.is_dir() else ():
        if not any(fnmatch(path.name, pattern) for pattern in without):
            if path.is_dir() and not path.is_symlink():
                add_folder(files, path, without)
            else:
                add(files, path)


def matching(roots: Iterable[str], names: Iterable[str] = ("",)) -> list[Path]:
    """The paths of this machine that match a root and a name below it."""
    patterns = [f"{root}/{name}".strip("/") for root in roots for name in names]
    return [path for pattern in patterns for path in sorted(Path("/").glob(pattern))]


# --- bytecode ------------------------------------------------------------------------------------------

RECIPE = 1  # to be raised when bytecode is made in another way
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# torch reads the sources of modules that name one of these, at import or to compile
READ_AGAIN = re.compile(rb"install_config_module|jit\.script|triton\.jit|\b_overload(_method)?\b")


@functools.cache
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


def bytecode(source: bytes, name: str, docstrings: bool = False) -> bytes:
    """What Python keeps in __pycache__, of a module whose statements all stand on line 1. Raises SyntaxError.

    Python takes it without a look at the source beside it (PEP 552, an unchecked hash).
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        bears = isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
        if bears and not docstrings:
            node.body[:1] = [] if len(node.body) > 1 else [ast.Pass(lineno=1, col_offset=0)]
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = 1
            node.col_offset = node.end_col_offset = 0
    code = compile(tree, name, "exec", optimize=0, dont_inherit=True)
    unchecked = (1).to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + unchecked + bytes(8) + marshal.dumps(code)


def beside(name: str) -> str:
    """Where Python looks for the bytecode of a module."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/__pycache__/{file.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"


def kept_bytecode(place: str, path: Path, docstrings: bool, read_again: bool) -> Path | None:
    """A module's bytecode in the cache, made where it is not there; None if its source has to stay."""
    its = path.stat()
    state = repr((RECIPE, sys.version, place, docstrings, its.st_ctime_ns, its.st_size))
    kept = cache_folder() / f"{hashlib.sha256(state.encode()).hexdigest()}.pyc"
    if kept.exists():
        return kept
    source = path.read_bytes()
    if read_again and READ_AGAIN.search(source):
        return None
    try:
        made = bytecode(source, place, docstrings)
    except SyntaxError:  # of another Python: nobody can import it
        made = bytecode(b"", place)
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
        file.write(made)
    os.replace(file.name, kept)  # whole, also where two processes make it
    return kept


def compiled(files: Files, docstrings: bool = False, read_again: bool = False) -> Files:
    """The same files, but the modules among them are empty, with bytecode beside them.

    `docstrings` stay where they are read. `read_again`: the sources that torch reads again stay.
    """
    found = dict(files)
    for place, path in files.items():
        module = place.endswith(".py") and isinstance(path, Path)
        if module and (kept := kept_bytecode(place, path, docstrings, read_again)):
            found |= {place: b"", beside(place): kept}
    return found


# --- Python -----------------------------------------------------------------------------------------------


def python() -> Files:
    """Python's program, its modules and the headers that torch.compile needs."""
    found: Files = {}
    stdlib = Path(sysconfig.get_path("stdlib"))
    add_folder(found, stdlib, NOT_OF_PYTHON)
    found = compiled(found)
    for path in (Path(sys.executable), Path(sys.base_prefix, "bin", "python3")):
        add(found, Path(os.path.abspath(path)))
    add(found, Path(sys.prefix, "pyvenv.cfg"))
    for name in ("include", "platinclude"):
        add_folder(found, Path(sysconfig.get_path(name)))
    return found


@functools.cache
def distributions(roots: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions by name that `roots` need, themselves included.

    Extras count: torch needs CUDA's libraries as those of a package that is empty.
    """
    found = {}
    seen = set()
    todo = [*map(Requirement, roots)]
    while todo:
        wanted = todo.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        extras = frozenset(wanted.extras or [""])
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform, or optional
        for need in map(Requirement, found[name].requires or ()):
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(need)
    return found


@functools.cache
def package(name: str, device: str) -> Files:
    """The files of one distribution.

    A GPU's kernels are made from sources, so for it packages outside the corpus stay as they are.
    """
    its = importlib.metadata.distribution(name)
    found: Files = {}
    site = add(found, Path(its.locate_file("")))
    text = name in CORPUS | VENDORS
    hidden = NOT_IMPORTED if text else ()
    for file in its.files or ():
        path = Path(f"{site}/{file}")
        unneeded = NOT_OF_PACKAGES.match(str(file)) or set(hidden) & set(file.parts)
        if not unneeded and path.is_file():  # whoever makes a small image removes some
            found[str(path)] = path
    if device == "cuda" and not text:
        return found
    torch = name == "torch"
    return compiled(found, docstrings=not (text or torch), read_again=torch)  # numpy.ma reads its own


# --- the system -------------------------------------------------------------------------------------------


@functools.cache
def driver() -> tuple[str, ...]:
    """The folder where the loader finds a GPU's driver, which may be any; none where there is no driver."""
    said = subprocess.run([sys.executable, "-I", "-S", "-c", DRIVER], capture_output=True, text=True).stdout
    return tuple(os.path.dirname(path) for path in said.split())


def system(device: str) -> Files:
    """The C++ compiler, what it links and includes, and what the loader reads."""
    found: Files = {}
    for folder in ("/bin", "/sbin", "/lib", "/lib64", "/usr/lib64", "/usr/sbin"):
        add(found, Path(folder))
    for program in PROGRAMS:
        if place := shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin"):
            add(found, Path(place))
    for folder in matching(OF_COMPILERS):
        add_folder(found, folder, NOT_OF_COMPILERS)
    for folder in matching(INCLUDES, HEADERS):
        add_folder(found, folder)
    drivers = matching((*LIBRARIES, *driver()), OF_GPUS) if device == "cuda" else []
    for path in matching(LIBRARIES, LOADED) + matching(INCLUDES, ["*.h"]) + drivers:
        add(found, path)
    add(found, Path("/etc/ld.so.cache"))
    return found


def processors() -> Files:
    """What programs read of /sys to know how many processors and caches there are."""
    roots = [f"/sys/devices/system/{kind}{each}" for kind in ("cpu", "node") for each in ("", "/*")]
    return {str(path): path.read_bytes() for path in matching(roots, PROCESSORS) if path.is_file()}


def loads(path: Path) -> bool:
    """Whether a file is a program or a library, which may need others."""
    if not (".so" in path.name or path.stat().st_mode & 0o111):  # os.access ignores a capability to read
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


@functools.cache
def installation(imports: tuple[str, ...], device: str, scores: bool = False) -> Files:
    """All of it, by paths in the sandbox. It stays while a command runs. `scores`: a text is scored there."""
    found = {**system(device), **processors(), **python()}
    names = {*distributions((*imports, "packaging", *VENDORS))}
    if scores:  # what the track's other imports need stays
        others = distributions(tuple(name for name in imports if name != "torch"))
        names -= NOT_TO_SCORE - {*others}
    sites = set()
    for name in sorted(names):
        found |= package(name, device)
        sites.add(str(importlib.metadata.distribution(name).locate_file("")))
    site = add(found, Path(sysconfig.get_path("purelib")))
    found[f"{site}/sandbox.pth"] = "\n".join(sorted(sites)).encode()  # PYTHONPATH may have named some
    loading = [str(path) for path in found.values() if isinstance(path, Path) and loads(path)]
    said = subprocess.run(["ldd", *loading], capture_output=True, text=True).stdout
    needed = re.findall(r"(?:=>|^)\s*(/\S+) \(0x", said, re.MULTILINE)  # by the loader's own answer
    for path in sorted(set(map(os.path.normpath, needed))):
        add(found, Path(path))
    return found
