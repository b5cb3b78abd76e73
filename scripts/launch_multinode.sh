#!/usr/bin/env bash
# Launch a training script on one node of a cluster; run it on every node with the same arguments.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: launch_multinode.sh [OPTION...] SCRIPT [ARGUMENT...]

Starts torchrun on this node. Run it on every node of the job, with the same options; nodes find each other at the
rendezvous endpoint. Each option can be given as the environment variable in brackets instead.

  --nnodes N | MIN:MAX     [NNODES] nodes of the job; with MIN:MAX it goes on as long as MIN are there. Required.
  --nproc-per-node N       [NPROC_PER_NODE] ranks on this node: a number, or "gpu" for one on each GPU. Required.
  --rdzv-endpoint HOST:PORT [RDZV_ENDPOINT] where nodes meet: a node of the job that the others reach by this name
                           and port. Required, unless the job has one node only.
  --rdzv-id ID             [RDZV_ID] name of the job, the same on all nodes and of no other job at this endpoint.
                           Required, unless the job has one node only.
  --max-restarts N         [MAX_RESTARTS] how often workers are started again after a failure. Default: 0.
  --interface NAME         [INTERFACE] network interface that ranks talk over, such as eth0: sets GLOO_SOCKET_IFNAME
                           and NCCL_SOCKET_IFNAME. Default: what gloo and NCCL choose.
  --local-addr ADDRESS     [LOCAL_ADDR] what other nodes call this one. Default: its hostname, which they must resolve.
  --rdzv-conf K=V,...      [RDZV_CONF] more for the rendezvous, such as last_call_timeout=30,join_timeout=600.
  --log-dir DIRECTORY      [LOG_DIR] where the output of each rank is written too; best on this node's own disk.
  --help                   This text.

[PYTHON] is the interpreter that torch is installed for. Default: python3. See docs/multinode.md.
USAGE
}

fail() {
    echo "launch_multinode.sh: $1 (--help tells more)" >&2
    exit 2
}

nnodes=${NNODES:-}
nproc=${NPROC_PER_NODE:-}
endpoint=${RDZV_ENDPOINT:-}
job=${RDZV_ID:-}
restarts=${MAX_RESTARTS:-0}
interface=${INTERFACE:-}
local_addr=${LOCAL_ADDR:-}
conf=${RDZV_CONF:-}
log_dir=${LOG_DIR:-}
python=${PYTHON:-python3}

while (($#)); do
    case $1 in
        --help | -h) usage; exit 0 ;;
        --) shift; break ;;
        -*) ;;
        *) break ;;
    esac
    option=${1%%=*}
    if [[ $1 == *=* ]]; then
        value=${1#*=}
        shift
    else
        (($# >= 2)) || fail "$option needs a value"
        value=$2
        shift 2
    fi
    case $option in
        --nnodes) nnodes=$value ;;
        --nproc-per-node) nproc=$value ;;
        --rdzv-endpoint) endpoint=$value ;;
        --rdzv-id) job=$value ;;
        --max-restarts) restarts=$value ;;
        --interface) interface=$value ;;
        --local-addr) local_addr=$value ;;
        --rdzv-conf) conf=$value ;;
        --log-dir) log_dir=$value ;;
        *) fail "unknown option $option; options of the script come after its name" ;;
    esac
done

(($#)) || fail "no training script"
script=$1
[[ -f $script ]] || fail "there is no training script '$script'"

[[ -n $nnodes ]] || fail "the number of nodes is missing: give --nnodes, or set NNODES"
[[ $nnodes =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || fail "--nnodes is '$nnodes', expected a number or MIN:MAX, such as 2:4"
fewest=${nnodes%%:*}
most=${nnodes##*:}
((fewest <= most)) || fail "--nnodes is '$nnodes': the smaller number comes first"

[[ -n $nproc ]] || fail "the number of ranks on this node is missing: give --nproc-per-node, or set NPROC_PER_NODE"
[[ $nproc =~ ^([1-9][0-9]*|gpu|cpu|auto)$ ]] || fail "--nproc-per-node is '$nproc', expected a number, gpu, cpu or auto"
[[ $restarts =~ ^[0-9]+$ ]] || fail "--max-restarts is '$restarts', expected a number"

if ((most > 1)); then
    [[ -n $endpoint ]] || fail "no place to meet: give --rdzv-endpoint HOST:PORT, or set RDZV_ENDPOINT"
    [[ -n $job ]] || fail "the job has no name: give --rdzv-id, or set RDZV_ID, the same on all nodes"
fi
endpoint=${endpoint:-localhost:0}
job=${job:-$$}
[[ $endpoint =~ ^.+:[0-9]+$ ]] || fail "--rdzv-endpoint is '$endpoint', expected HOST:PORT, such as node-1:29400"

if [[ -n $interface ]]; then
    if [[ -r /proc/net/dev ]]; then
        interfaces=$(awk -F: 'NR > 2 { gsub(/ /, "", $1); printf "%s ", $1 }' /proc/net/dev)
        [[ " $interfaces" == *" $interface "* ]] || fail "no network interface '$interface' here; there are: $interfaces"
    fi
    export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi
command -v "$python" > /dev/null || fail "there is no interpreter '$python': set PYTHON"

agent=("$python" -m torch.distributed.run --nnodes "$nnodes" --nproc-per-node "$nproc" --max-restarts "$restarts")
agent+=(--rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "$job")
[[ -z $conf ]] || agent+=(--rdzv-conf "$conf")
[[ -z $local_addr ]] || agent+=(--local-addr "$local_addr")
if [[ -n $log_dir ]]; then
    mkdir -p "$log_dir"
    agent+=(--log-dir "$log_dir" --tee 3)
fi
exec "${agent[@]}" -- "$@"  # or torchrun would take options of the script for its own
