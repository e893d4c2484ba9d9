"""python .gpu/step.py NAME SCRIPT [NAME=VALUE...]: warm up, wait for .gpu/run/go-NAME, time a step."""
import os, statistics, sys, time
from pathlib import Path
name, script, *env = sys.argv[1:]
os.environ.update(dict(x.split("=", 1) for x in env))
sys.path.insert(0, os.getcwd())
import torch
from tests import bench
cuda = torch.cuda.is_available()
began = time.time()
run = Path(".gpu/run"); run.mkdir(exist_ok=True)
try:
    what = os.environ.pop("WHAT", "step")
    m = bench.Measured(Path(script).resolve(), what)
    warm = time.time() - began
    (run / f"ready-{name}").touch()
    while not (run / f"go-{name}").exists():
        time.sleep(0.05)
    def times(call, n):
        seconds = []
        for _ in range(n):
            if cuda: torch.cuda.synchronize()
            seconds.append(bench.seconds_of(call) if not cuda else bench.seconds_of(lambda: (call(), torch.cuda.synchronize())))
        return [round(1e3 * x, 2) for x in (min(seconds), statistics.median(seconds), max(seconds))]
    n = int(os.environ.get("REPEATS", "20"))
    print(f"   {name}: losses {[round(float(m.call()), 4) for _ in range(4)]}" if what == "step" else "")
    whole = times(m.call, n)
    print(f"STEP {name}: warm {warm:.0f}s  ms {whole}  tok/s {m.tokens / whole[1] * 1e3:.0f}", flush=True)
    if what == "step":
        s = m.trainer.s
        mfu = m.script.step_flops(s) / whole[1] * 1e3 / m.trainer.machine.peak_flops
        batch = m.trainer.machine.tensor(bench.random_tokens(s, s.batch_slots, s.slot_tokens + 1)).to(m.trainer.machine.device)
        first = m.script.Plan(s).step(0)
        grad_of = getattr(m.trainer, "gradient", None)
        args = (batch, first.seq_len) if hasattr(first, "seq_len") else (batch,)
        print(f"   {name}: mfu {mfu:.1%} peak {m.trainer.machine.peak_flops/1e12:.0f} TFLOP/s gradient {times(lambda: grad_of(*args), n)}", end=" ")
        loss, grad = grad_of(*args)
        finite = torch.ones((), dtype=torch.bool, device=grad.device)
        print(f"optimizer {times(lambda: m.trainer.optimizer.step(grad, first, finite), n)}", end=" ")
        if cuda: print(f"memory {torch.cuda.max_memory_allocated() >> 20} MiB")
        if hasattr(first, "seq_len") and s.start_seq_len:
            last = m.script.Plan(s).step(0, 1e9)
            print(f"   {name}: long steps {times(lambda: float(m.trainer.step(batch, last)[0]), n)}")
except Exception as error:
    import traceback
    print(f"STEP {name}: FAILED", repr(error)[:300], flush=True); traceback.print_exc()
finally:
    (run / f"ready-{name}").touch(); (run / f"done-{name}").touch()
