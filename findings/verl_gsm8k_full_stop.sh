#!/usr/bin/env bash
# verl 0.9.1: its reward for GSM8K gives 0 to a right answer that ends with a full stop, or that has a dollar sign.
#
# The strict way, which is the default, reads the characters 0-9 , . - behind "#### ", and compares the text with the
# reference.  So "#### 72." is "72.", which is not "72"; and "#### $72" has no digit where one must stand, although the
# code takes dollar signs out of what it has found.  GSM8K's own references never look so, but responses of a policy
# do, and whole groups then score 0 although they are right.  Ask for the bare number in the prompt, or strip before.
# Exits with 0 while this is so.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$work/site" verl==0.9.1
"$work/venv/bin/python" - "$work/site/verl/utils/reward_score/gsm8k.py" <<'EOF'
import importlib.util
import sys

spec = importlib.util.spec_from_file_location("gsm8k", sys.argv[1])  # the package around it wants torch and Ray
gsm8k = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gsm8k)
wanted = {"#### 72": 1.0, "#### 1,072": 0.0, "So she has 72 left.\n#### 72\n": 1.0, "#### 72.": 0.0, "#### $72": 0}
found = {text: gsm8k.compute_score(text, "72") for text in wanted}
print("verl 0.9.1, reference 72:", found)
assert found == wanted, "verl has changed"
EOF
