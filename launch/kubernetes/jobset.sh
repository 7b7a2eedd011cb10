#!/usr/bin/env bash
# Prints a JobSet (https://jobset.sigs.k8s.io) that runs a program on several pods, a torchrun in each. It needs the JobSet
# controller in the cluster, and an image that holds trn_dist, this folder's parent and the program.
#
#   NODES=4 IMAGE=registry.example/trn_dist:1 launch/kubernetes/jobset.sh train.py --steps 100 | kubectl apply -f -
set -euo pipefail

NAME=${NAME:-trn-dist}                  # of the JobSet, and of the service by which its pods find each other
NAMESPACE=${NAMESPACE:-default}
IMAGE=${IMAGE:-}                        # holds trn_dist and the program
WORKDIR=${WORKDIR:-/workspace}          # in the image: the folder that holds launch/ and the program
NODES=${NODES:-2}                       # pods
NPROC_PER_NODE=${NPROC_PER_NODE:-64}    # ranks in each: the logical NeuronCores of a trn2.48xlarge
MAX_RESTARTS=${MAX_RESTARTS:-0}         # restarts of all ranks by torchrun, while the pods stay
CPU=${CPU:-8}                           # of each pod
MEMORY=${MEMORY:-64Gi}                  # of each pod; what the simulated devices hold counts as its memory
RDZV_PORT=${RDZV_PORT:-29500}

fail() {
  echo "$0: $1" >&2
  exit 2
}

[[ $# -gt 0 ]] || fail "usage: [VARIABLE=VALUE...] $0 [-m] PROGRAM [ARGS...]"
[[ -n $IMAGE ]] || fail "set IMAGE to a container image that holds trn_dist and the program"
# The names of the pods, <NAME>-node-0-<number>, must fit into 63 characters.
[[ $NAME =~ ^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$ ]] || fail "NAME=$NAME: lower-case letters, digits and dashes, 42 at most"
for variable in NODES NPROC_PER_NODE RDZV_PORT; do
  [[ ${!variable} =~ ^[1-9][0-9]*$ ]] || fail "$variable=${!variable}: must be a whole number above 0"
done
[[ $MAX_RESTARTS =~ ^[0-9]+$ ]] || fail "MAX_RESTARTS=$MAX_RESTARTS: must be a whole number"

# A string as JSON, which is YAML too.
quote() {
  local text=$1
  text=${text//\\/\\\\}
  text=${text//\"/\\\"}
  text=${text//$'\n'/\\n}
  text=${text//$'\t'/\\t}
  printf '"%s"' "$text"
}

arguments=""
for argument in "$@"; do
  arguments+="
                    - $(quote "$argument")"
done

cat <<MANIFEST
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $NAME
  namespace: $(quote "$NAMESPACE")
spec:
  network:
    enableDNSHostnames: true
    subdomain: $NAME
  failurePolicy:
    maxRestarts: 0
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          parallelism: $NODES
          completions: $NODES
          completionMode: Indexed
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              containers:
                - name: ranks
                  image: $(quote "$IMAGE")
                  workingDir: $(quote "$WORKDIR")
                  command:
                    - bash
                    - -c
                    - 'RDZV_CONF=is_host=\$((JOB_COMPLETION_INDEX == 0)) exec launch/torchrun.sh "\$@"'
                    - torchrun.sh
                  args:$arguments
                  env:
                    - name: NNODES
                      value: "$NODES"
                    - name: NPROC_PER_NODE
                      value: "$NPROC_PER_NODE"
                    - name: MAX_RESTARTS
                      value: "$MAX_RESTARTS"
                    - name: RDZV_ID
                      value: $NAME
                    - name: RDZV_ENDPOINT
                      value: $NAME-node-0-0.$NAME:$RDZV_PORT
                    - name: LOCAL_ADDR
                      valueFrom:
                        fieldRef:
                          fieldPath: status.podIP
                  resources:
                    requests:
                      cpu: $(quote "$CPU")
                      memory: $(quote "$MEMORY")
                    limits:
                      memory: $(quote "$MEMORY")
MANIFEST
