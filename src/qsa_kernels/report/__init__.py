"""Tables, runs, figures and pages made from measurements."""
