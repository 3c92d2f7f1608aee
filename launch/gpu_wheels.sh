#!/usr/bin/env bash
# Downloads the packages that launch/test_gpu.sh needs beside jax, numpy and pytest, for a machine without network:
# bash launch/gpu_wheels.sh FOLDER [PACKAGE ...]. Wheels of CPython 3.12 for Linux on x86-64, at most 64 MiB together.
# With PACKAGEs it downloads those alone, for a machine that has the others.
set -euo pipefail
folder=${1:?usage: bash launch/gpu_wheels.sh FOLDER [PACKAGE ...]}
shift
# shellcheck disable=SC2206
packages=("$@")
if [ ${#packages[@]} -eq 0 ]; then
  packages=(
    flax optax chex 'orbax-checkpoint<0.13' tensorstore ml-collections absl-py psutil
    # what these import
    etils humanize msgpack nest-asyncio protobuf pygments pyyaml rich simplejson toolz treescope typing-extensions
  )
fi
platforms=()
for version in 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${version}_x86_64"); done
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any \
  --dest "$folder" "${packages[@]}"
size=$(($(du -cb "$folder"/*.whl | tail -1 | cut -f1)))
echo "$(ls "$folder"/*.whl | wc -l) wheels of $((size >> 20)) MiB in $folder"
if [ "$size" -gt $((64 << 20)) ]; then
  echo "error: $folder has $((size >> 20)) MiB of wheels, allowed are 64: name only the packages that are missing" >&2
  exit 2
fi
