"""Studies, one question per file: the arms to compare, the comparison, and how to read the answer.

A study is a module with a function `study()` that returns a `rllib_srl.studies.study.Study`: arms on a stream of
domains, paired by seed, at an equal budget of generated tokens. The first line of its docstring asks the question, the
rest states which result answers it. `srl tune` lists and runs studies, `srl report` reads their results.

`arms.py` holds the shared parts of the studies: the settings of a trial, the arms, and the stream they run on.
"""
