"""The share of each of many runs in one cluster: workers and preprocessing cores, decided together. Pure: values in, values out."""
