# two ranks of train_gpt.py on one card: NCCL 2.31 allows that, and LD_PRELOAD puts it in the place of torch's own
L=$1; shift
[ -z "$REHEARSE" ] && export LD_PRELOAD=/tmp/nccl/libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_DEBUG=INFO
ranks() { n=$1; port=$2; shift 2; for r in 0 1; do env "$@" RUN_ID=$n WARMUP_STEPS=3 DIST_TIMEOUT=30 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port WORLD_SIZE=2 RANK=$r LOCAL_RANK=0 timeout 100 python3 train_gpt.py > $L/$n.$r.log 2>&1 & eval P$r=$!; done; }
ends() { wait $P0; a=$?; wait $P1; echo "$1: exit $a and $?"; grep -hE "^(val_bpb|steps|train_seconds|peak|resumed)|rror|lost|WARN" $L/${1/n-again/n-killed}.?.log | grep -v "NCCL INFO" | cut -c1-250 | tail -12; }
ranks n-two 29611 "$@"; ends n-two; grep -h "NCCL INFO" $L/n-two.0.log | grep -E "version|nRanks|comm 0x" | head -4
python3 - <<'PY'
import json
def losses(n): return [e["train_loss"] for e in map(json.loads, open(f"logs/{n}/metrics.jsonl")) if "train_loss" in e]
a, b = losses("g-floppy"), losses("n-two")
print("losses", len(a), len(b), "largest difference", max(abs(x / y - 1) for x, y in zip(a, b)))
PY
ranks n-killed 29612 "$@" CKPT_SECONDS=1 ITERATIONS=200000 MAX_FLOPS=0 VAL_LOSS_EVERY=0
for i in $(seq 300); do sleep 0.2; kill -0 $P0 2>/dev/null || break; [ -n "$(ls -A logs/n-killed/checkpoint 2>/dev/null)" ] && break; done; sleep 1.5
pkill -9 -P $P1; S=$SECONDS; ends n-killed; echo "rank 0 ended after $((SECONDS-S)) s"; tail -3 $L/n-killed.0.log | cut -c1-300
cp $L/n-killed.0.log $L/n-killed.first.log; B=$(ls -lA --time-style=full-iso logs/n-killed/checkpoint 2>&1 | md5sum)
ranks n-killed 29613 "$@" CKPT_SECONDS=1 ITERATIONS=200000 MAX_FLOPS=0 VAL_LOSS_EVERY=0
for i in $(seq 300); do sleep 0.2; kill -0 $P0 2>/dev/null || break; [ "$B" != "$(ls -lA --time-style=full-iso logs/n-killed/checkpoint 2>&1 | md5sum)" ] && break; done; sleep 1
kill -TERM $P0 $P1; ends n-again; grep -h resumed $L/n-killed.0.log; tail -3 $L/n-killed.0.log | cut -c1-300
