"""The readers of plans, problems, records and captures: command line, report, observation, doctor, study, testing."""
