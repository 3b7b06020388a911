"""The stub: an engine without a model, whose answers follow a stated law of learning and forgetting.

    law.py       chances of right, wrong and malformed answers; how an update changes them
    answers.py   the texts of right and wrong answers, from the environments' gold turns
    engine.py    the engine that writes them; `rllib_srl.learner.stub` is its learner
"""
