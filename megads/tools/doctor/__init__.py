"""What `megads doctor` checks: this machine and its software, each defect with its cost and its remedy."""
