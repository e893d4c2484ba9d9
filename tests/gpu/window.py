"""python .gpu/window.py RUN DEVICE ROWS...: a predictor's step with its window full, and with it empty."""
import sys, time, importlib.util
from pathlib import Path
import numpy as np, torch
run, device, *rows = sys.argv[1:]
spec = importlib.util.spec_from_file_location("record", Path(run) / "train_gpt.py")
m = sys.modules["record"] = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
p = m.load_predictor(Path(run) / "model.ptz", device)
for n in map(int, rows):
    try:
        p.start(n)
        ids = np.random.default_rng(0).integers(0, p.vocab_size, n)
        def ms(k):
            s = []
            for _ in range(k):
                t = time.perf_counter(); p.step(ids); s.append(time.perf_counter() - t)
            return round(1e3 * float(np.median(s)), 2)
        short = ms(20)
        for c in p.caches:
            c.keys.zero_(); c.values.zero_(); c.position = p.s.eval_window + 5
        full = ms(20)
        gb = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0
        print(f"WINDOW {run} rows {n}: step {short} ms empty, {full} ms full; 62e6 tokens {62e6 / n * full / 1e3:.0f} s; memory {gb:.1f} GB", flush=True)
    except Exception as e:
        print("WINDOW", run, n, "FAILED", repr(e)[:200])
