"""Which wall of the sandbox breaks CUDA? Run in the repository, with PYTHONPATH=/tmp/site:

    python3 .gpu/probe_sandbox.py [cuda|cpu] [SECONDS of each try]

Facts first, then a small program behind one wall each, all at once; last the referee's own sandbox.
"""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"
LIMIT = int(sys.argv[2]) if len(sys.argv) > 2 else 40
BEGAN = time.time()
sys.path.insert(0, os.getcwd())

PROGRAM = """
import sys, time
began = time.time()
def say(words):
    print(f"{words}@{time.time() - began:.1f}", end=" ", flush=True)
device = sys.argv[1]
if device == "cuda":
    import ctypes
    cuda = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    say(f"cuInit:{cuda.cuInit(0)}")
    say(f"count:{cuda.cuDeviceGetCount(ctypes.byref(count))},{count.value}")
import torch
say("torch")
say(f"ones:{torch.ones(2, device=device).sum().item()}")
x = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
say(f"bf16:{(x @ x)[0, 0].item()}")
print("WORKS", flush=True)
"""

FACTS = r"""
date; uname -r; id -u; nproc; grep -E 'MemTotal|MemAvailable' /proc/meminfo; df -h / /tmp /dev/shm | cat
command -v python3; python3 -V; echo LD_LIBRARY_PATH=$LD_LIBRARY_PATH
ldconfig -p | grep -E 'libcuda|libnvidia' | head -8; ls -d /usr/local/nvidia /usr/local/nvidia/*; ls /usr/local/nvidia/lib* | head -40
mount | grep -i nvidia; cat /etc/ld.so.conf.d/*nvidia* 2>&1 | head -4
ls -l /dev/nvidia* /dev/nvidia-caps; ls /proc/driver/nvidia; mount | grep -E 'cgroup' ; cat /proc/self/cgroup | head -3
cat /sys/fs/cgroup/cgroup.controllers; command -v bwrap setpriv prlimit ldd cc systemd-run nvidia-modprobe
ls -l /proc/self/ns/user; cat /proc/sys/user/max_user_namespaces /proc/sys/kernel/unprivileged_userns_clone /proc/sys/kernel/apparmor_restrict_unprivileged_userns
ls /sys /sys/bus/pci/devices | head -30; ulimit -a | grep -E 'locked|open|proc'
namei -l "$(readlink -f $(command -v python3))" | head -12; ls -la /opt/torch/.venv/bin/python3 /opt/torch/.venv/pyvenv.cfg; cat /opt/torch/.venv/pyvenv.cfg
"""
MAPS = """
import ctypes
ctypes.CDLL("libcuda.so.1").cuInit(0)
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if "cuda" in line or "nvidia" in line}))
"""


def title(words):
    print(f"\n=== {words} ({time.time() - BEGAN:.0f} s)", flush=True)


def run(words, limit=LIMIT, **options):
    """The last of what a command says, its exit code and seconds."""
    began = time.time()
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit, **options
        )
        said, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        said, code = (error.stdout or b"").decode(errors="replace"), "TIMEOUT"
    except OSError as error:
        said, code = str(error), "OSERROR"
    return said.strip(), code, time.time() - began


def facts():
    title("facts")
    print(run(["sh", "-c", FACTS], 15)[0])
    title("what libcuda.so.1 loads")
    print(run([sys.executable, "-I", "-c", MAPS], 15)[0][-1500:])


def referee():
    """What the referee finds here."""
    title("what the referee finds")
    from records.sandbox import bubblewrap, installation, limits

    print("bwrap:", bubblewrap.tried())
    way = limits.find()
    print("cgroups:", way and way.__name__, {k: str(v) for k, v in limits.mounts().items() if k in ("cgroup2", "memory")})
    print("driver:", installation.driver(), "gpus:", *map(str, bubblewrap.gpus(DEVICE)), flush=True)
    return bubblewrap.find()


def variants(bwrap):
    """Name -> (command line before the program, environment, whether with our filter of calls)."""
    from records.sandbox import bubblewrap, limits
    from records.sandbox.limits import Limits
    from records.sandbox.predictor import Mode, environment, lowered

    env = {**os.environ, "HOME": "/tmp"}
    env.pop("PYTHONPATH", None)
    ours = environment(Mode(DEVICE))
    root = [bwrap, "--ro-bind", "/", "/", "--proc", "/proc", "--bind", "/tmp", "/tmp"]
    bound = [word for path in bubblewrap.gpus(DEVICE) for word in ("--dev-bind", str(path), str(path))]
    few = [*root, "--dev", "/dev", *bound]
    apart = [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    apart += ["--hostname", "sandbox", "--die-with-parent", "--new-session"]
    readonly = ["--remount-ro", "/dev"]
    hidden = [w for n in bubblewrap.COUNTERS if os.path.exists(f"/proc/{n}") for w in ("--ro-bind", "/dev/null", f"/proc/{n}")]
    rights = ["--cap-drop", "ALL"]
    if os.geteuid() == 0:
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    lower = lowered(Mode(DEVICE), Limits())
    home = []  # a Python that lies in root's own folder, where another user may not look
    if any(place.startswith("/root/") for place in (sys.prefix, sys.base_prefix)):
        home = ["--perms", "0755", "--tmpfs", "/root"]
        for place in map(Path, dict.fromkeys((sys.base_prefix, sys.prefix))):
            if place.is_relative_to("/root"):
                above = [word for p in reversed(place.parents[:-2]) for word in ("--perms", "0755", "--dir", str(p))]
                home += [*above, "--ro-bind", str(place), str(place)]
    processors = ["--tmpfs", "/sys", "--ro-bind", "/sys/devices/system", "/sys/devices/system"]
    pci = [w for p in ("/sys/bus/pci", "/sys/devices") if os.path.exists(p) for w in ("--ro-bind", p, p)]
    found = {
        "0 no sandbox": ([], env, False),
        "1 bwrap, all of /dev": ([*root, "--dev-bind", "/dev", "/dev", "--"], env, False),
        "2 only /dev/nvidia*": ([*few, "--"], env, False),
        "3 2 + remount-ro /dev": ([*few, *readonly, "--"], env, False),
        "4 2 + no /sys at all": ([*few, "--tmpfs", "/sys", "--"], env, False),
        "5 2 + /sys/devices/system alone": ([*few, *processors, "--"], env, False),
        "6 2 + /sys/bus/pci, /sys/devices alone": ([*few, "--tmpfs", "/sys", *pci, "--"], env, False),
        "7 2 + namespaces apart": ([*few, *apart, "--"], env, False),
        "8 2 + counters of /proc hidden": ([*few, *hidden, "--"], env, False),
        "9 2 + our environment": ([*few, "--"], ours, False),
        "A 2 + caps dropped, user 64000, rlimits": ([*few, *home, *rights, "--", *lower], env, False),
        "B 2 + our filter of calls": ([*few, "--seccomp", "FILTER", "--"], env, True),
        "C all of these walls": (
            [*few, *home, *readonly, *processors, *hidden, *apart, *rights, "--seccomp", "FILTER", "--", *lower], ours, True,
        ),
    }
    if limits.find():
        found["D C in a cgroup of 8 GiB"] = found["C all of these walls"]
    return found


def one(variant):
    """A line for a variant."""
    from records.sandbox import bubblewrap, limits

    name, (before, env, filtered) = variant
    descriptor = None
    group = None
    try:
        if filtered:
            descriptor = os.memfd_create("filter")
            os.write(descriptor, bubblewrap.refused_calls())
            os.lseek(descriptor, 0, 0)
            before = [str(descriptor) if word == "FILTER" else word for word in before]
        if name.startswith("D"):
            group = limits.make(8 << 30, 2048)
            before = [*group.words(), *before]
        words = [*before, os.path.abspath(sys.executable), "-I", "-B", "-c", PROGRAM, DEVICE]
        said, code, seconds = run(words, env=env, cwd="/", pass_fds=[descriptor] if filtered else [])
        used = f" {group.usage()}" if group else ""
        good = "ok  " if code == 0 and "WORKS" in said else "FAIL"
        return f"{good} {name}: exit {code}, {seconds:.0f} s{used}: {said[-160:] if good == 'ok  ' else said[-700:]}"
    except Exception as error:
        return f"FAIL {name}: the probe itself: {type(error).__name__}: {error}"
    finally:
        if descriptor is not None:
            os.close(descriptor)
        if group:
            group.remove()


REAL = """
import sys, time
began = time.time()
from pathlib import Path
from records.sandbox import installation
from records.__main__ import main
device = sys.argv[1]
imports = ("numpy", "safetensors", "sentencepiece", "torch", "tqdm")
files = installation.installation(imports, device, device == "cpu")
paths = [path for path in files.values() if isinstance(path, Path)]
print(f"files:{len(files)} bytes:{sum(path.stat().st_size for path in paths)/1e9:.2f}e9 listed@{time.time()-began:.1f}")
print("packages:", *sorted(installation.distributions(imports)))
print("driver's:", *sorted({Path(p).name for p in files if "libcuda" in p or "libnvidia-" in p})[:12], flush=True)
began = time.time()
code = main(["score", ".gpu/tiny", "--track", ".gpu/track_gpu", "--dataset", "probe_sp1024", "--data", ".gpu/data", "--device", device, *sys.argv[2:]])
print(f"score: exit code {code} in {time.time()-began:.1f} s", flush=True)
"""
INSIDE = """
import sys, subprocess, os, time
from records.sandbox.limits import Limits
from records.sandbox.predictor import Mode, watched
device, program = sys.argv[1:]
python = [os.path.abspath(sys.executable), "-I", "-B", "-c", program, device]
pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
imports = ("numpy", "safetensors", "sentencepiece", "torch", "tqdm")
with watched(python, {}, imports, Mode(device, scores=device == "cpu"), Limits(), **pipes) as watchdog:
    while watchdog.is_alive() and watchdog.process.poll() is None:
        time.sleep(0.1)
    time.sleep(0.3)
    watchdog.stop()
    print(watchdog.verdict, watchdog.process.returncode, watchdog.kind, watchdog.tail.decode(errors="replace"))
"""


def main():
    facts()
    bwrap = referee()
    title("the small program, first alone: it warms the files")
    todo = variants(bwrap or "bwrap")
    print(one(("0 no sandbox", todo.pop("0 no sandbox"))), flush=True)
    title("behind one wall each, side by side")
    workers = max(2, min(len(todo), (os.cpu_count() or 2)))
    with ThreadPoolExecutor(workers) as pool:
        for line in pool.map(one, todo.items()):
            print(line, flush=True)
    title("the referee's own sandbox: score of a tiny run")
    said, code, seconds = run([sys.executable, "-c", REAL, DEVICE], 3 * LIMIT)
    print(f"exit {code}, {seconds:.0f} s\n{said[-3000:]}", flush=True)
    if code != 0 or "PASS sandbox" not in said or "-v" in sys.argv:
        title("the small program in the referee's own sandbox")
        said, code, seconds = run([sys.executable, "-c", INSIDE, DEVICE, PROGRAM], 2 * LIMIT)
        print(f"exit {code}, {seconds:.0f} s\n{said[-2500:]}", flush=True)
        title("the same score with --trust")
        said, code, seconds = run([sys.executable, "-c", REAL, DEVICE, "--trust"], 2 * LIMIT)
        print(f"exit {code}, {seconds:.0f} s\n{said[-1200:]}", flush=True)
    title("end")


main()
