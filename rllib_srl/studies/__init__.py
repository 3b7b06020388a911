"""Studies of continual learning: retention and cost of each run, and statistical comparisons between runs.

    evaluations of a trial --accuracy_IC, costs--> measures of a trial --over seeds--> intervals, differences, verdict
    records.py               curves.py             measures.py           seeds.py      contrasts.py
                                                   (accuracy.py defines them)

Except for `trial.py`, which runs one trial, and `report/`, nothing here plays, trains or plots: the input is arrays or
files. To run a study:

    study = Study(...)                                         study.py: all of it is fixed beforehand
    write_study(directory, study)                              refuses a directory that holds another study
    trial = TrialWriter(directory, study, arm, seed)           refuses a finished trial
    trial.add(Evaluation(...))                                 before training, and at the end of each stage

To read a study: `read_results(directory)`, `curves_of(results)`, `findings_of(curves)`,
`verdict_of(results, findings)`.

Terms. A *stage* is a period of training on one domain or mixture, numbered from 0; before any training it is -1. An
*evaluation* measures every domain once. A domain is *learned at* the stage after which it counts as learned: its last
stage of training in a stream with boundaries. An *arm* is one setting under comparison, a *trial* is one arm with one
seed, and trials of two arms with the same seed are a *pair*.

Dimension letters, in addition to those of types.py: S stages, C domains, I evaluations, E seeds, A answers.
"""
