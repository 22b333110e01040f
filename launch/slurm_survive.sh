#!/bin/bash
# A run on a SLURM cluster that goes on without its dead nodes, one process per GPU:
#   sbatch launch/slurm_survive.sh my.yml run_dir=/shared/my-run global_batch_size=1024 batch_padding=true
# Everything after the script goes to `maxbatch train`. Adjust the #SBATCH lines; docs/launching.md explains them.
#SBATCH --job-name=maxbatch
#SBATCH --nodes=4
#SBATCH --no-kill
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=maxbatch-%j.log

readonly SAVED_AND_STOPPED=75 WRONG_INPUT=2
fewest_nodes=${FEWEST_NODES:-$((SLURM_JOB_NUM_NODES - 1))} # with fewer, the job is requeued and waits for others
restarts=${MOST_RESTARTS:-20}

# Prints the nodes of the job that start a process within half a minute.
answering() {
    local node
    while read -r node; do
        timeout 30 srun --nodes=1 --ntasks=1 --nodelist="$node" true < /dev/null > /dev/null 2>&1 && echo "$node"
    done < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
}

signalled=""
step=""
trap 'signalled=yes; [ -z "$step" ] || kill -TERM "$step" 2> /dev/null' TERM
for ((run = 0; run <= restarts; run++)); do
    nodes=$(answering)
    count=$(wc -w <<< "$nodes")
    if [ -n "$signalled" ] || [ "$count" -lt "$fewest_nodes" ]; then
        break
    fi
    # A lost node must not end the others' processes: they end by themselves once its heartbeat is missed.
    srun --nodes="$count" --ntasks=$((count * SLURM_NTASKS_PER_NODE)) --nodelist="$(paste -sd, <<< "$nodes")" \
        --no-kill --kill-on-bad-exit=0 maxbatch train "$@" &
    step=$!
    wait "$step"
    code=$?
    if [ -n "$signalled" ]; then # a signal ends `wait`, but not the step
        wait "$step"
        now=$?
        [ "$now" -eq 127 ] || code=$now # 127: it had ended before
    fi
    step=""
    if [ "$code" -eq 0 ] || [ "$code" -eq "$WRONG_INPUT" ]; then
        exit "$code"
    fi
    echo "slurm_survive.sh: exit code $code on $count nodes; starting again on those that answer"
done
if [ "$run" -le "$restarts" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit "$SAVED_AND_STOPPED"
fi
exit "$code"
