# the second call: the figures, quiet
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
L=/tmp/gpulogs; rm -rf $L; mkdir -p $L; T0=$SECONDS; say() { echo "[$((SECONDS-T0))s] $*"; }; keep() { tar -C $L -czf ${OUT:-/tmp}/logs.tgz .; }
CPU=${REHEARSE:+1}; KIND=${CPU:+cpu}; KIND=${KIND:-cuda}
if [ -z "$CPU" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
  export PYTHONPATH=/tmp/site; tar xf .gpu/demo.tar.xz
fi
say installed
DEMO="DATA_PATH=data/datasets/demo_sp1024"; BIG="PRESET=10min_16mb $DEMO"; INT6="PRESET=10min_16mb_int6 $DEMO"; SECS=${SECS:-150}
Q="TRAIN_BATCH_TOKENS=98304"; FLOPPY="PRESET=floppy"
if [ -n "$CPU" ]; then TINY="NUM_LAYERS=2 MODEL_DIM=64 NUM_HEADS=4 NUM_KV_HEADS=2 TRAIN_SEQ_LEN=128 TRAIN_BATCH_TOKENS=2048 VAL_BATCH_SIZE=4096 VAL_TOKENS_LIMIT=8192 DEVICE=cpu COMPILE=0 WARMUP_STEPS=1"
  BIG="$BIG $TINY"; INT6="$INT6 $TINY START_SEQ_LEN=32"; FLOPPY="PRESET=smoke $TINY $DEMO ITERATIONS=8"; Q="TRAIN_BATCH_TOKENS=2048"; fi
rm -rf .gpu/run logs/g-*; mkdir -p .gpu/run logs
# --- all at once, nothing is timed
(timeout 100 python3 -m pytest -m cuda -q -n 4 tests/trainer/test_cuda.py --durations=5 -p no:cacheprovider > $L/pytest.log 2>&1; echo "rc $?" >> $L/pytest.log; say pytest) &
(env $FLOPPY RUN_ID=g-floppy timeout 90 python3 train_gpt.py > $L/floppy.log 2>&1; say floppy $?
 timeout 80 python3 -m records prove logs/g-floppy --track .gpu/track_gpu --dataset half_sp1024 --data .gpu/data --device $KIND > $L/prove-floppy.log 2>&1; say prove floppy in the sandbox $?) &
(env $BIG RUN_ID=g-warm ITERATIONS=2 VAL_LOSS_EVERY=0 VAL_TOKENS_LIMIT=65536 WARMUP_STEPS=1 BUDGET_BYTES=20000000 timeout 90 python3 train_gpt.py > $L/warm.log 2>&1; say warm big $?) &
run() { n=$1; s=$2; shift 2; python3 .gpu/step.py $n $s "$@" > $L/s-$n.log 2>&1 & }
run fl train_gpt.py $FLOPPY; run int6 train_gpt.py $INT6; run q-now train_gpt.py $INT6 $Q; run q-dict .gpu/v3.py $INT6 $Q
run q-2048 train_gpt.py $INT6 $Q TRAIN_SEQ_LEN=${CPU:+64}$([ -z "$CPU" ] && echo 2048) START_SEQ_LEN=0
while [ $((SECONDS-T0)) -lt ${PHASE:-115} ]; do sleep 1; [ $(jobs -r | wc -l) -le 5 ] && break; done
say "phase 2; jobs: $(jobs -r | wc -l)"; pkill -f pytest; pkill -f records; sleep 1; keep
bash .gpu/turns.sh 15 fl q-now q-dict q-2048 int6
cat $L/s-*.log | grep -vi warn | grep -v DEBUG | tail -40
for run in g-warm g-floppy; do timeout 30 python3 .gpu/window.py logs/$run $KIND 1024 ${CPU:+2}; done 2>&1 | grep WINDOW
python3 - $L <<'PY' && cp .gpu/v3.py train_gpt.py && say "the mask made outside is faster: taken"
import re, sys
ms = [float(re.search(r"ms \[[^,]+, ([^,]+),", open(f"{sys.argv[1]}/s-{n}.log").read())[1]) for n in ("q-now", "q-dict")]
print("in graph, outside:", ms); sys.exit(0 if ms[0] > 1.03 * ms[1] else 1)
PY
keep; say "trainings"
train() { n=$1; shift; env "$@" RUN_ID=$n MAX_WALLCLOCK_SECONDS=$SECS VAL_LOSS_EVERY=0 WARMUP_STEPS=3 BUDGET_BYTES=20000000 timeout $((SECS+60)) python3 train_gpt.py > $L/$n.log 2>&1; say $n $?; grep -hE "^(train_seconds|steps|tokens_seen|train_flops|total_bytes|artifact_bytes|peak_memory|val_bpb|params|skipped_steps|eval_seconds)|^step.*val_bpb|Error|rror:" $L/$n.log; cp logs/$n/metrics.jsonl $L/$n.jsonl; cp logs/$n/model.ptz ${OUT:-/tmp}/$n.ptz; keep; }
train g-ref $BIG; train g-int6 $INT6
for run in g-ref g-int6; do timeout 40 python3 -m records score logs/$run --track .gpu/track_gpu --dataset half_sp1024 --data .gpu/data --device $KIND --trust > $L/trust-$run.log 2>&1; say trust $run $?; cat $L/trust-$run.log | cut -c1-200; done; keep
timeout 30 python3 .gpu/window.py logs/g-int6 $KIND 1024 2048 4096 2>&1 | grep WINDOW
timeout 70 python3 -m records score logs/g-int6 --track .gpu/track_gpu --dataset half_sp1024 --data .gpu/data --device $KIND > $L/score-int6.log 2>&1; say score int6 in the sandbox $?; cat $L/score-int6.log | cut -c1-200; keep
tail -25 $L/pytest.log | cut -c1-200; cat $L/prove-floppy.log | cut -c1-300; grep -hE "val_bpb|train_seconds" $L/floppy.log | tail -4; say end; keep
