"""Cases, references and worlds that the tests of every folder share."""
