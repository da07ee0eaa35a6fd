#!/usr/bin/env bash
# torch 2.13.0: the switches for huge pages, torch's THP_MEM_ALLOC_ENABLE=1 and glibc's glibc.malloc.hugetlb=1, leave most
# weights of a small model in small pages.
#
# torch asks the system for huge pages for tensors of at least 2 MiB each, and glibc (2.35 and newer) for every block with
# a mapping of its own, which is any of 128 KiB or more at first.  In bfloat16 every matrix of SmolLM2-135M's layers is
# smaller than a huge page (the largest has 1.7 MiB): torch passes it by, and a mapping of that size has no room for one.
# With glibc.malloc.mmap_max=0 blocks come from the heap, and then all weights lie in huge pages.
# Exits with 0 while this is so, and with 77 where the system gives huge pages to nobody or to everybody.
set -euo pipefail
enabled=/sys/kernel/mm/transparent_hugepage/enabled
if ! grep -qs '\[madvise\]' "$enabled"; then
  echo "this system does not give huge pages to processes that ask, and to those alone: $(cat "$enabled" 2>&1)"
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$work/share.py" <<'EOF'
import re
from pathlib import Path

import torch


def huge():
    return 1024 * int(re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1])


LAYER = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
before = huge()
weights = [torch.ones(shape, dtype=torch.bfloat16) for shape in [(49152, 576), *LAYER * 30]]
print(round((huge() - before) / sum(w.nbytes for w in weights), 2))
EOF
share() { env "$@" "$work/venv/bin/python" "$work/share.py"; }
neither=$(share THP_MEM_ALLOC_ENABLE=0)
of_torch=$(share THP_MEM_ALLOC_ENABLE=1)
of_glibc=$(share GLIBC_TUNABLES=glibc.malloc.hugetlb=1)
in_heap=$(share GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0)
# Seen: 0.0, 0.2, 0.34, 1.0
echo "share of the weights in huge pages: neither $neither, torch's $of_torch, glibc's $of_glibc, and in the heap $in_heap"
awk -v n="$neither" -v t="$of_torch" -v g="$of_glibc" -v h="$in_heap" \
  'BEGIN { exit !(n < 0.05 && t < 0.3 && g < 0.6 && h > 0.9) }'
