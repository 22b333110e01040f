#!/bin/bash
# A run on a SLURM cluster, one process per GPU:   sbatch launch/slurm.sh my.yml run_dir=/shared/my-run
# Everything after the script goes to `maxbatch train`. Adjust the #SBATCH lines; docs/launching.md explains them.
#SBATCH --job-name=maxbatch
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=maxbatch-%j.log

readonly SAVED_AND_STOPPED=75

srun maxbatch train "$@" &
step=$!
# Passes on a signal that reaches only this script; the script must survive it to requeue the job.
signalled=""
trap 'signalled=yes; kill -TERM "$step" 2> /dev/null' TERM
wait "$step"
code=$?
while [ -n "$signalled" ]; do # a signal ends `wait`, but not the step
    signalled=""
    wait "$step"
    now=$?
    [ "$now" -eq 127 ] || code=$now # 127: it had ended before
done

if [ "$code" -eq "$SAVED_AND_STOPPED" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
