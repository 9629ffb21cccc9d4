"""Deep search before and after training, on questions that the training does not see."""
