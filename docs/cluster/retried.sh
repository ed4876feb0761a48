#!/bin/bash
# Run a study whose job is tried again wherever its pods are taken away: it goes on from the states of its runs.
# Exit code 3, nothing reached the target, is an answer, too, for which nothing is tried again.
#
#   retried.sh python -m autotune experiment=cnn study.name=cnn
"$@"
code=$?
if [ "$code" = 3 ]; then
    echo "nothing reached the target (exit code 3)"
    exit 0
fi
exit "$code"
