#!/usr/bin/env bash
# Makes the wheels that the images install: into deploy/wheels, with this machine's pip and pip's own configuration
# (indexes, find-links, certificates, proxies). With wheels there, an image build needs no network.
#
#   deploy/build-wheels.sh              PYTHON=... chooses the interpreter; it must be the images' version, 3.11
#
# Whatever was in deploy/wheels is replaced, all or nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
"$PYTHON" - <<'CHECK'
import sys
if sys.version_info[:2] != (3, 11):
    sys.exit(f"error: wheels for the images need Python 3.11, got {sys.version.split()[0]}; PYTHON=python3.11 {sys.argv[0]}")
CHECK

new=$(mktemp -d deploy/wheels/.new.XXXXXX)
trap 'rm -rf "$new"' EXIT
"$PYTHON" deploy/libraries.py --build >"$new/libraries.txt"
"$PYTHON" -m pip wheel --quiet --prefer-binary --wheel-dir "$new" \
  --constraint constraints/host.txt --requirement "$new/libraries.txt"
rm -f deploy/wheels/*.whl
mv "$new"/*.whl deploy/wheels/
echo "$(find deploy/wheels -name '*.whl' | wc -l) wheels, $(du -sh deploy/wheels | cut -f1), in deploy/wheels"
