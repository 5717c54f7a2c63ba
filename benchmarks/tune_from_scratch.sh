#!/usr/bin/env bash
# Does tuning find what is known, from a bad start and with the known schedules left out? One sequence of 16384, full, head_dim 64, 128, 256.
# Usage: tune_from_scratch.sh [FOLDER for the results] [head_dim …]. Each takes one to two minutes on an H200 with 16 CPU cores.
set -euo pipefail
folder=${1:-benchmarks/results}
shift || true
[ $# -gt 0 ] || set -- 64 128 256
for d in "$@"; do
  heads=$((2048 / d))
  fagen tune fa3 --set head_dim="$d" --set tile_kv=64 --set stages=1 --set overlap=none --exclude-known \
    --shape "1,$heads,$heads,16384,16384" --vs none --budget 300s --output "$folder/tune_hd$d.json"
done
