"""The board: all methods and the best combinations, at equal bytes, by the place of the question and by length."""
