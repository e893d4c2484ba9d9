# what two calls of 2026-11-27 left open, the most wanted first; about 480 s. Carry .whl and .gpu, remove
# records/track_floppy/20* from the working tree before (64 MiB): git rm -rq ..., after it git restore -SW ...
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
L=/tmp/gpulogs; rm -rf $L; mkdir -p $L; T0=$SECONDS; say() { echo "[$((SECONDS-T0))s] $*"; }; keep() { tar -C $L -czf ${OUT:-/tmp}/logs.tgz .; }
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
export PYTHONPATH=/tmp/site; tar xf .gpu/demo.tar.xz
DEMO="DATA_PATH=data/datasets/demo_sp1024"; rm -rf logs/g-*
train() { n=$1; shift; env "$@" RUN_ID=$n $DEMO VAL_LOSS_EVERY=0 WARMUP_STEPS=3 BUDGET_BYTES=20000000 python3 train_gpt.py > $L/$n.log 2>&1; say $n $?; tail -45 $L/$n.log | grep -hE "^(train_seconds|steps|tokens_seen|total_bytes|artifact_bytes|peak_memory|val_bpb|params|skipped)|^step.*val_bpb|rror:"; cp logs/$n/metrics.jsonl $L/$n.jsonl; keep; }
(python3 -c "import sys; sys.path.insert(0, '.')
from records.sandbox.installation import installation
installation(('numpy', 'safetensors', 'sentencepiece', 'torch', 'tqdm'), 'cuda')" > /dev/null 2>&1; say listed) &
train g-int6 PRESET=int6 MAX_WALLCLOCK_SECONDS=150          # alone on the card: about 200 s with its compilation
train g-floppy PRESET=floppy                                # about 60 s, most of it compilation
wait
timeout 30 python3 .gpu/window.py logs/g-int6 cuda 1024 2048 4096 2>&1 | grep WINDOW
for run in g-floppy g-int6; do timeout 120 python3 -m records prove logs/$run --track .gpu/track_gpu --dataset half_sp1024 --data .gpu/data --device cuda > $L/prove-$run.log 2>&1; say prove $run in the sandbox $?; cut -c1-200 $L/prove-$run.log; keep; done
timeout 100 python3 -m pytest -m cuda -q -n 6 tests/trainer/test_cuda.py -p no:cacheprovider > $L/pytest.log 2>&1; say pytest $?; tail -20 $L/pytest.log | cut -c1-200; keep
