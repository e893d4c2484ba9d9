# turns.sh SECONDS NAME...: when all are ready (or after SECONDS), let them be timed one after another
limit=$1; shift; began=$SECONDS
for n in "$@"; do while [ ! -e .gpu/run/ready-$n ] && [ $((SECONDS-began)) -lt $limit ]; do sleep .1; done; [ -e .gpu/run/ready-$n ] || echo "not ready: $n"; done
for n in "$@"; do if [ -e .gpu/run/ready-$n ]; then touch .gpu/run/go-$n; t=$SECONDS; while [ ! -e .gpu/run/done-$n ] && [ $((SECONDS-t)) -lt 30 ]; do sleep .05; done; fi; done
