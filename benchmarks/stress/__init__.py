"""Thousands of random and adversarial calls of every public function, beside exact arithmetic.

Inputs are small and belong to the families of `inputs.py`. Results are compared with decimal arithmetic of 200 digits;
each error must be within the budget of its function (`budgets.py`). Every instruction set of the machine takes its
share of the cases. What overflows the dtype of a result must be infinite. Tensors are also put against pages that
cannot be read or written, and readers of the training layer get damaged files. A wrong answer is listed with the number
of its case: `--functions solve --number 17` runs that case alone.
"""
