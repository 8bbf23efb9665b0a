"""One model on several devices: rank 0 leads, a process for each further rank follows."""
