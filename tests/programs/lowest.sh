#!/usr/bin/env bash
# A quick part of the tests in an environment with the lowest version of each requirement in pyproject.toml. What only the
# tests need has its newest version. Arguments go to pytest. PYTHON: the interpreter beside which uv is; the environment has its
# Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

at=build/lowest
uv="$(dirname "$PYTHON")/uv"
mkdir -p build
"$uv" pip compile pyproject.toml --python "$PYTHON" --resolution lowest-direct --no-header --no-annotate --quiet >build/lowest.txt
if ! cmp -s build/lowest.txt "$at/requirements.txt"; then
    "$uv" venv --quiet --clear --python "$PYTHON" "$at"
    export VIRTUAL_ENV="$PWD/$at"
    "$uv" pip install --compile-bytecode -r build/lowest.txt
    "$uv" pip install pytest pytest-timeout pytest-xdist hypothesis aiohttp webdataset --constraint build/lowest.txt
    "$uv" pip install --no-deps -e .
    cp build/lowest.txt "$at/requirements.txt"
fi

quick=(tests/adapt tests/measure tests/model tests/pipeline tests/test_collate.py tests/test_transforms.py tests/test_versions.py)
# Two of these need packages that are no requirements, and two compare with parts of Ray Data that its lowest version lacks.
left_out=(--ignore tests/model/test_adaptdl.py --ignore tests/model/test_catalog.py --ignore tests/pipeline/test_ray_plan.py
    --ignore tests/pipeline/test_units.py)
"$at/bin/python" -m pytest --quiet --numprocesses 2 -m "not slow and not hosts and not soak and not ray" "${quick[@]}" "${left_out[@]}" "$@"
