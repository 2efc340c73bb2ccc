#!/usr/bin/env bash
# Makes the wheels that the images install: into deploy/wheels, with this machine's pip and pip's own configuration
# (indexes, find-links, certificates, proxies). With wheels there, building an image needs no network.
#
#   deploy/build-wheels.sh [--if-needed]     --if-needed: only if those that are there were made for other versions
#
# PYTHON=... chooses the interpreter, which must be of the images' version, 3.11. What was in deploy/wheels is replaced,
# all or nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
"$PYTHON" - <<'CHECK'
import sys
if sys.version_info[:2] != (3, 11):
    sys.exit(f"error: the images have Python 3.11, got {sys.version.split()[0]}; set PYTHON to an interpreter of 3.11")
CHECK

wheels=deploy/wheels
made_for=$( (cat constraints/host.txt && "$PYTHON" deploy/libraries.py --build) | sha256sum)
if [ "${1:-}" = --if-needed ] && [ "$(cat $wheels/.made-for 2>/dev/null)" = "$made_for" ]; then exit 0; fi

new=$(mktemp -d $wheels/.new.XXXXXX)
trap 'rm -rf "$new"' EXIT
"$PYTHON" deploy/libraries.py --build >"$new/libraries.txt"
"$PYTHON" -m pip wheel --quiet --prefer-binary --wheel-dir "$new" \
  --constraint constraints/host.txt --requirement "$new/libraries.txt"
rm -f $wheels/.made-for $wheels/*.whl
mv "$new"/*.whl $wheels/
echo "$made_for" >$wheels/.made-for
echo "$(find $wheels -name '*.whl' | wc -l) wheels, $(du -sh $wheels | cut -f1), in $wheels"
