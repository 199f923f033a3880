#!/bin/bash
# Runs a command with the environment's programs first on PATH: run_in_venv.sh COMMAND...
set -euo pipefail
# shellcheck source=scripts/bootstrap/settings.sh
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap/settings.sh"
enter_venv
cd "$ROOT"
exec "$@"
