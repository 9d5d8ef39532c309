# For the scripts beside this file, which source it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

say() { printf '\n=== %s (%d:%02d)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60)); }

# Working interpreters of the Pythons we support, oldest first. A name on PATH may be a shim for a
# version that is not there, so each is asked.
pythons() {
  local version candidate
  for version in 3.11 3.12 3.13 3.14; do
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python python3; do
      if [[ $("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1) == "$version" ]]; then
        command -v "$candidate"
        break
      fi
    done
  done
}
mapfile -t found < <(pythons)
[[ ${#found[@]} -gt 0 ]] || { echo "no Python 3.11 or newer on PATH"; exit 1; }
oldest=${found[0]} newest=${found[-1]}
