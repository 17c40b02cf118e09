"""Methods of other papers, which generate the parts of an answer in parallel."""
