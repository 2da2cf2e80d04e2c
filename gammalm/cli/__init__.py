"""The command line: one thin module per subcommand (`add_parser(subparsers)` and `run(args) -> exit status`): parse, call, print."""
