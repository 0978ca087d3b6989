#!/usr/bin/env bash
# A quick part of the tests in an environment with the lowest version of each requirement in pyproject.toml, and of the extras
# that these tests use. What only the tests need has its newest version. Arguments go to pytest. PYTHON: the interpreter beside
# which uv is; the environment has its Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

at=build/lowest
uv="$(dirname "$PYTHON")/uv"
extras=(--extra opencv --extra regions --extra demo)
beside=(pytest pytest-timeout pytest-xdist hypothesis aiohttp webdataset adaptdl==0.2.11)
mkdir -p build
"$uv" pip compile pyproject.toml "${extras[@]}" --python "$PYTHON" --resolution lowest-direct --no-header --no-annotate --quiet \
    >build/lowest.txt
if ! printf '%s\n' "${beside[@]}" | cat build/lowest.txt - | cmp -s - "$at/requirements.txt"; then
    "$uv" venv --quiet --clear --python "$PYTHON" "$at"
    export VIRTUAL_ENV="$PWD/$at"
    "$uv" pip install --compile-bytecode -r build/lowest.txt
    "$uv" pip install "${beside[@]}" --constraint build/lowest.txt
    "$uv" pip install --no-deps -e .
    printf '%s\n' "${beside[@]}" | cat build/lowest.txt - >"$at/requirements.txt"
fi

quick=(tests/adapt tests/measure tests/model tests/pipeline tests/test_collate.py tests/test_transforms.py tests/test_versions.py)
# The first two compare with parts of Ray Data that its lowest version lacks. The others need clients of S3, which do not go
# together with the newest python-dateutil.
left_out=(--ignore tests/pipeline/test_ray_plan.py --ignore tests/pipeline/test_units.py --ignore tests/model/test_catalog.py
    --deselect tests/pipeline/test_sources.py::test_s3
    --deselect tests/pipeline/test_sources.py::test_a_file_system_of_fsspec_reads_a_file_in_one_request
    --deselect tests/pipeline/test_cached_files.py::test_equal_paths_on_two_servers_are_two_files)
"$at/bin/python" -m pytest --quiet --numprocesses 2 -m "not slow and not hosts and not soak and not ray" "${quick[@]}" "${left_out[@]}" "$@"
