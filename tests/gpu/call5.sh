# 2026-11-27, the second card, right after callA.sh: the referee
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
L=/tmp/gpulogs; rm -rf $L; mkdir -p $L; T0=$SECONDS; say() { echo "[$((SECONDS-T0))s] $*"; }; keep() { tar -C $L -czf ${OUT:-/tmp}/logs.tgz .; }
CPU=${REHEARSE:+1}; KIND=${CPU:+cpu}; KIND=${KIND:-cuda}
if [ -z "$CPU" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
  export PYTHONPATH=/tmp/site; tar xf .gpu/demo.tar.xz
fi
say installed; ls logs | tr '\n' ' '; nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader
REFEREE="--track .gpu/track_gpu --dataset ${SET:-half}_sp1024 --data .gpu/data --device $KIND"
judge() { verb=$1; run=$2; limit=$3; shift 3; n=$verb-$run${1:+-trust}; timeout $limit python3 -m records $verb logs/$run $REFEREE "$@" > $L/$n.log 2>&1; say $n $?; grep -hE "^(val_bpb|val_tokens|rows|seconds|processor_seconds|limits|PASS|FAIL|UNKNOWN|NO)|rror" $L/$n.log | cut -c1-260; keep; }
judge prove g-int6 120
judge score g-int6 60 --trust
timeout 60 python3 .gpu/window.py logs/g-int6 $KIND 1024 2048 4096 2>&1 | grep WINDOW | tee $L/window.log
judge prove g-quiet 80
judge score g-quiet 40 --trust
timeout 60 env PRESET=smoke DATA_PATH=data/datasets/demo_sp1024 RUN_ID=g-smoke python3 train_gpt.py > $L/smoke.log 2>&1; say smoke $?; grep -hE "^(val_bpb|train_seconds|steps)|rror" $L/smoke.log
judge score g-ref 40 --trust
keep; say end
