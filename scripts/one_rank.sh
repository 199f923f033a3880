#!/bin/bash
# One rank of a run whose output people read: rank 0 speaks as it goes, the others into files.
# RANK_LOGS names the folder; used by scripts/run_tests.sh under horovodrun.
rank=${OMPI_COMM_WORLD_RANK:-${HOROVOD_RANK:-0}}
[ "$rank" = 0 ] || exec >"$RANK_LOGS/rank$rank.log" 2>&1
exec "$@"
