"""Write the files that are made from tables: ``make pages``."""

from docpages import PAGES, ROOT, written

for name in PAGES:
    (ROOT / name).write_text(written(name), encoding="utf-8")
