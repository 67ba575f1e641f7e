"""A fuzzer over every format that visard reads: `python -m tests.fuzz --files 50000 --seed 0`.

Valid files, made by visard's own writers, are changed by mutations that know the structure of their format and by some
that do not (`mutate`), and read as a command reads them (`formats`). Each must be read, or end in one line, without
running code, writing elsewhere, much memory or time (`runner`).
"""
