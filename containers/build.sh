#!/bin/sh
# Build the image with buildah, without Docker, a daemon or a registry, and run it once. The base comes from Debian's packages.
#
#   TORCH_SHA256=... containers/build.sh [MORE ARGUMENTS OF buildah build]
#
# It needs Debian's packages buildah and mmdebstrap.
set -eu
cd "$(dirname "$0")/.."
test -n "${TORCH_SHA256:-}" || { echo "TORCH_SHA256=...: the digest of the wheel of torch (docs/containers.md)" >&2; exit 2; }
for tool in buildah mmdebstrap; do
    command -v "$tool" > /dev/null || { echo "$tool is not installed (Debian: apt-get install buildah mmdebstrap)" >&2; exit 2; }
done
folder=$(mktemp -d)
made=
trap 'rm -rf "$folder"; test -z "$made" || buildah rm "$made" > /dev/null' EXIT

mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-venv,python-is-python3 bookworm "$folder/base.tar"
made=$(buildah from scratch)
buildah add --quiet "$made" "$folder/base.tar" /
buildah commit --quiet --rm "$made" localhost/visard-base
made=

# the docker format keeps HEALTHCHECK, which the OCI format does not know
buildah build --format docker --isolation chroot --file containers/Dockerfile --build-arg BASE=localhost/visard-base \
    --build-arg TORCH_SHA256="$TORCH_SHA256" --tag localhost/visard "$@" .

made=$(buildah from localhost/visard)
buildah run --isolation chroot "$made" -- sh -euc '
    test "$(id -u)" = 10001
    ! touch /opt/visard/anything 2> /dev/null
    visard run demo --set method.rounds=1 --out /data/demo > /data/log 2>&1 || { cat /data/log; exit 1; }
    visard report /data/demo --out /data/again.html'
echo "localhost/visard is built; it ran the demo as account 10001"
