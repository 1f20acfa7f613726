#!/bin/sh
# Asks a server of the bundled model whatever its own OpenAPI description allows, and what it forbids:
# nothing may be answered with 5xx, a status the description lacks, or a body of another form.
#
#   pip install schemathesis    # in an environment of its own; it is no dependency of the project
#   PYTHON=.venv/bin/python bench/schemathesis.sh [options of `schemathesis run`]
set -eu
cd "$(dirname "$0")/.."
log=$(mktemp)
"${PYTHON:-python}" -m openjet_jax.cli serve tiny --port 0 --name tiny --agents 2 --context 512 \
  --max-tokens 8 --request-timeout 60 >"$log" &
server=$!
trap 'kill $server; wait $server || true; rm -f "$log"' EXIT
until at=$(sed -n 's/^serving on //p' "$log") && [ -n "$at" ]; do
  kill -0 $server
  sleep 0.2
done
schemathesis run "$at/openapi.json" --phases examples,coverage,fuzzing --max-examples 200 \
  --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance \
  --continue-on-failure --request-timeout 90 --suppress-health-check all "$@"
