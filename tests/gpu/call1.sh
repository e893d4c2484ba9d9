# the first call: what is broken, and what each part takes
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
L=/tmp/gpulogs; rm -rf $L; mkdir -p $L; keep() { tar -C $L -czf ${OUT:-/tmp}/logs.tgz .; }; T0=$SECONDS; say() { echo "[$((SECONDS-T0))s] $*"; }
CPU=${REHEARSE:+1}; KIND=${CPU:+cpu}; KIND=${KIND:-cuda}
if [ -z "$CPU" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
  export PYTHONPATH=/tmp/site
  (mkdir -p /tmp/fa4 && tar -C /tmp/fa4 -xf .fa4/fa4.tar.xz; say fa4 unpacked) &
  tar xf .gpu/demo.tar.xz
fi
say installed; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>&1 | tail -1; nproc
python3 -c "import sys, torch; print(sys.version.split()[0], torch.__version__, sys.prefix)"
PYTHONPATH=$PWD:$PYTHONPATH python3 .gpu/make_dev.py
DEMO="DATA_PATH=data/datasets/demo_sp1024"; DEV="DATA_PATH=data/datasets/dev_sp1024"
BIG="PRESET=10min_16mb $DEMO"; INT6="PRESET=10min_16mb_int6 $DEMO"; SHORT=""
if [ -n "$CPU" ]; then TINY="NUM_LAYERS=2 MODEL_DIM=64 NUM_HEADS=4 NUM_KV_HEADS=2 TRAIN_SEQ_LEN=128 TRAIN_BATCH_TOKENS=2048 VAL_BATCH_SIZE=4096 VAL_TOKENS_LIMIT=8192 DEVICE=cpu COMPILE=0 WARMUP_STEPS=1"
  BIG="$BIG $TINY"; INT6="$INT6 $TINY START_SEQ_LEN=32"; FL="PRESET=smoke $TINY $DEMO ITERATIONS=8"; FLOPPY="$FL"; else FLOPPY="PRESET=floppy"; FL=PRESET=floppy; fi
LRB=98304; LRN=300; [ -n "$CPU" ] && LRB=2048 && LRN=4
rm -rf .gpu/run logs/g-*; mkdir -p .gpu/run
# --- all at once: compilers work, tests run, nothing is timed
(timeout 135 python3 -m pytest -m cuda -q -n 5 tests/trainer/test_cuda.py --durations=6 -p no:cacheprovider > $L/pytest.log 2>&1; echo "rc $?" >> $L/pytest.log; say pytest) &
(timeout 130 python3 .gpu/probe_sandbox.py $KIND 40 > $L/probe.log 2>&1; say probe) &
(env $BIG RUN_ID=g-big BUDGET_BYTES=20000000 ITERATIONS=10 VAL_LOSS_EVERY=0 VAL_TOKENS_LIMIT=65536 WARMUP_STEPS=1 python3 train_gpt.py > $L/big.log 2>&1; say big $?
 for lr in 0.02 0.04 0.08; do env $INT6 $DEV RUN_ID=g-lr$lr TRAIN_BATCH_TOKENS=$LRB MATRIX_LR=$lr ITERATIONS=$LRN VAL_LOSS_EVERY=0 VAL_TOKENS_LIMIT=262144 WARMUP_STEPS=1 timeout 95 python3 train_gpt.py > $L/lr$lr.log 2>&1 & done; wait; say lrs) & TRAIN=$!
(env $FLOPPY RUN_ID=g-floppy timeout 150 python3 train_gpt.py > $L/floppy.log 2>&1; say floppy $?) &
python3 .gpu/step.py fl train_gpt.py $FL > $L/fl.log 2>&1 &
python3 .gpu/step.py v1 .gpu/v1.py $FL > $L/v1.log 2>&1 &
python3 .gpu/step.py big train_gpt.py $BIG > $L/stepbig.log 2>&1 &
Q="TRAIN_BATCH_TOKENS=98304"; [ -n "$CPU" ] && Q="TRAIN_BATCH_TOKENS=2048"
for v in train_gpt.py .gpu/v2.py .gpu/v3.py; do n=q-$(basename $v .py); python3 .gpu/step.py $n $v $INT6 $Q > $L/$n.log 2>&1 & done
while [ $((SECONDS-T0)) -lt ${PHASE:-145} ]; do sleep 1; [ $(jobs -r | wc -l) -le 6 ] && break; done
say "phase 2; jobs: $(jobs -r | wc -l)"; pkill -f pytest; pkill -f probe_sandbox; sleep 1; keep
bash .gpu/turns.sh 20 fl v1 big q-train_gpt q-v2 q-v3
cat $L/fl.log $L/v1.log $L/stepbig.log $L/q-*.log | grep -vi warn | tail -30
keep
# --- attention
say attention
ROWS='today|sdpa cudnn|varlen (rep|sha)|flex$|flex (safe|128x64)|^fa4$'
attention() { PYTHONPATH=$PYTHONPATH:/tmp/fa4:/tmp/fa4/nvidia_cutlass_dsl/python_packages timeout $1 python3 -m tests.bench_attention --device $KIND --only "$ROWS" $2 > $L/attention.log 2>&1; }
(attention 120; grep -q "re-initialize\|initialization error" $L/attention.log && attention 110 --spawn; say attention ended) & ATT=$!
# --- the referee, while the attention's kernels are compiled
for run in logs/g-floppy logs/g-big; do
  timeout 60 python3 -m records score $run --track .gpu/track_gpu --data .gpu/data --dataset half_sp1024 --device $KIND --trust > $L/trust-$(basename $run).log 2>&1; say trust $run $?; tail -25 $L/trust-$(basename $run).log
done
keep; wait $ATT; keep
[ $((SECONDS-T0)) -lt 250 ] && timeout 70 python3 -m records prove logs/g-floppy --track .gpu/track_gpu --dataset half_sp1024 --data .gpu/data --device $KIND > $L/prove-floppy.log 2>&1; say prove $?; tail -25 $L/prove-floppy.log
cat $L/attention.log | tail -70
for f in floppy big lr0.02 lr0.04 lr0.08; do echo "== $f"; grep -hE "val_bpb|train_seconds|steps:|artifact_bytes|peak_memory|Error|error|budget:" $L/$f.log | tail -9; done
echo == pytest; tail -40 $L/pytest.log; echo == probe; cat $L/probe.log | tail -70
keep; say end
