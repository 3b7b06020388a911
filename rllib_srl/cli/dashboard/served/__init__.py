"""The live page of a served model (`srl serve`): its versions, conversations and training."""
