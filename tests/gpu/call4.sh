# 2026-11-27, the second card. First everything that compiles, side by side, nothing timed; then the trainings, alone.
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
L=/tmp/gpulogs; rm -rf $L; mkdir -p $L; T0=$SECONDS; say() { echo "[$((SECONDS-T0))s] $*"; }; keep() { tar -C $L -czf ${OUT:-/tmp}/logs.tgz .; }
CPU=${REHEARSE:+1}; KIND=${CPU:+cpu}; KIND=${KIND:-cuda}
if [ -z "$CPU" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
  export PYTHONPATH=/tmp/site; tar xf .gpu/demo.tar.xz; mkdir -p /tmp/nccl; xz -dc .gpu/libnccl.xz > /tmp/nccl/libnccl.so.2
fi
say installed; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1 | tail -1
DEMO="DATA_PATH=data/datasets/demo_sp1024"; BIG="PRESET=10min_16mb $DEMO"; INT6="PRESET=int6 $DEMO"; SECS=${SECS:-150}; FLOPPY="PRESET=floppy"
Q="TRAIN_BATCH_TOKENS=98304"; Q4=4096
if [ -n "$CPU" ]; then TINY="NUM_LAYERS=2 MODEL_DIM=64 NUM_HEADS=4 NUM_KV_HEADS=2 TRAIN_SEQ_LEN=128 TRAIN_BATCH_TOKENS=2048 VAL_BATCH_SIZE=4096 VAL_TOKENS_LIMIT=8192 DEVICE=cpu COMPILE=0 WARMUP_STEPS=1"
  BIG="$BIG $TINY"; INT6="$INT6 $TINY"; FLOPPY="PRESET=smoke $TINY $DEMO ITERATIONS=8"; Q="TRAIN_BATCH_TOKENS=2048"; Q4=64; fi
rm -rf .gpu/run logs/g-* logs/n-*; mkdir -p .gpu/run logs
COMMON="VAL_LOSS_EVERY=${EVERY:-100} WARMUP_STEPS=3 BUDGET_BYTES=20000000"
train() { n=$1; shift; env "$@" RUN_ID=$n $COMMON timeout 330 python3 train_gpt.py > $L/$n.log 2>&1; say $n $?; }
show() { grep -hE "^(train_seconds|steps|tokens_seen|total_bytes|artifact_bytes|peak_memory|val_bpb|params|skipped)|^step.*val_bpb|rror:" $L/$1.log; cp logs/$1/metrics.jsonl $L/$1.jsonl; cp logs/$1/model.ptz ${OUT:-/tmp}/$1.ptz; keep; }
# --- side by side
(python3 -c "import sys; sys.path.insert(0, '.')
from records.sandbox.installation import installation
installation(('numpy', 'safetensors', 'sentencepiece', 'torch', 'tqdm'), '$KIND')" > /dev/null 2>&1; say listed) &
(train g-warm6 $INT6 ITERATIONS=2 VAL_TOKENS_LIMIT=65536) & A=$!
(train g-warm0 $BIG ITERATIONS=2 VAL_TOKENS_LIMIT=65536) & B=$!
(train g-floppy $FLOPPY) &
(bash .gpu/nccl.sh $L $FLOPPY > $L/nccl.out 2>&1; say nccl) & C=$!
(timeout 170 python3 -m pytest -m cuda -q -n 6 tests/trainer/test_cuda.py --durations=5 -p no:cacheprovider > $L/pytest.log 2>&1; say pytest $?) & P=$!
run() { n=$1; s=$2; shift 2; python3 .gpu/step.py $n $s "$@" > $L/s-$n.log 2>&1 & }
run q-2048 train_gpt.py $INT6 $Q; run q-4096 train_gpt.py $INT6 $Q TRAIN_SEQ_LEN=$Q4
wait $A $B; say warm
while { kill -0 $P || kill -0 $C; } 2>/dev/null && [ $((SECONDS-T0)) -lt ${PHASE:-140} ]; do sleep 0.5; done; pkill -f pytest; pkill -f nccl.sh; pkill -f 'RUN_ID=n-'; sleep 1; nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader; keep
cat $L/nccl.out | cut -c1-300; tail -15 $L/pytest.log | cut -c1-300
# --- alone
train g-int6 $INT6 MAX_WALLCLOCK_SECONDS=$SECS; show g-int6
train g-ref $BIG MAX_WALLCLOCK_SECONDS=$SECS; show g-ref
train g-quiet $FLOPPY; show g-quiet; show g-floppy
bash .gpu/turns.sh 15 q-2048 q-4096; cat $L/s-*.log | grep -vi warn | grep -E "STEP|mfu|losses"
keep; say end
