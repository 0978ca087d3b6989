"""The charts of the page: values first, which the page draws as SVG and ``--png`` as pictures."""
