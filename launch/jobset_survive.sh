#!/bin/bash
# Keeps a JobSet running on the TPU slices of a GKE cluster that are ready, from any machine with kubectl:
#   launch/jobset_survive.sh launch/jobset_survive.yml
# docs/launching.md explains it.

readonly SAVED_AND_STOPPED=75 WRONG_INPUT=2
[ -f "$1" ] || {
    echo "usage: launch/jobset_survive.sh JOBSET.yml" >&2
    exit "$WRONG_INPUT"
}
file=$1

# Prints a field of the JobSet.
field() {
    kubectl create --dry-run=client -f "$file" -o "jsonpath={.$1}"
}
job='spec.replicatedJobs[0].template.spec'
selector="$job"'.template.spec.nodeSelector.cloud\.google\.com/gke-tpu'
name=$(field metadata.name) && most=$(field 'spec.replicatedJobs[0].replicas') && hosts=$(field "$job.parallelism") &&
    accelerator=$(field "$selector-accelerator") && topology=$(field "$selector-topology") || exit 1
fewest=${FEWEST_SLICES:-$((most - 1))} # with fewer, the script waits for others
restarts=${MOST_RESTARTS:-20}
poll=${POLL_S:-15}

# Prints the number of slices, which are node pools, whose hosts are all ready.
ready() {
    kubectl get nodes \
        -l "cloud.google.com/gke-tpu-accelerator=$accelerator,cloud.google.com/gke-tpu-topology=$topology" \
        -o 'jsonpath={range .items[*]}{.metadata.labels.cloud\.google\.com/gke-nodepool}{" "}{.status.conditions[?(@.type=="Ready")].status}{" "}{.spec.unschedulable}{"\n"}{end}' |
        awk -v hosts="$hosts" -v most="$most" '$2 == "True" && $3 != "true" { count[$1]++ }
            END { for (pool in count) slices += count[pool] == hosts; print slices < most ? slices + 0 : most }'
}

# Deletes the JobSet; its hosts save, and have ended when this returns.
stop() {
    kubectl delete jobset "$name" --ignore-not-found --cascade=foreground
}
trap 'stop; exit "$SAVED_AND_STOPPED"' TERM INT

for ((run = 0; run <= restarts; run++)); do
    until slices=$(ready) && [ "$slices" -ge "$fewest" ]; do
        sleep "$poll"
    done
    sed "s/^\( *replicas:\).*/\1 $slices/" "$file" | kubectl create -f - || exit 1
    echo "jobset_survive.sh: started on $slices slices"
    state=running
    while [ "$state" = running ]; do
        sleep "$poll" & # a signal ends `wait`, not `sleep`
        wait $!
        found=$(kubectl get jobset "$name" --ignore-not-found -o 'jsonpath={.metadata.name} {.status.terminalState}') ||
            continue # the cluster does not answer
        case "$found" in
            *Completed) exit 0 ;;
            *Failed) state=failed ;;
            "$name"*) ;;
            *) exit 1 ;; # somebody has deleted it
        esac
    done
    codes=$(kubectl get pods -l "jobset.sigs.k8s.io/jobset-name=$name" \
        -o 'jsonpath={.items[*].status.containerStatuses[*].state.terminated.exitCode}')
    if [[ " $codes " == *" $WRONG_INPUT "* ]]; then
        exit "$WRONG_INPUT" # the JobSet and its logs stay
    fi
    echo "jobset_survive.sh: exit codes ${codes:-unknown} on $slices slices; starting again on those that are ready"
    stop
done
exit 1
