"""The figures of the first paper, each by its id: what it reads, how it is drawn, and the numbers that are in it.

    catalog     every figure's id, and what a figure is
    run         trains what figures read, draws them, writes the page of all of them
    cells       what the figures of losses share
    curves      fig1a fig1d fig1e fig1h fig2b fig2c: loss curves side by side
    losses      fig1b fig2a fig3b: final losses against size and γ
    init        fig1c fig3a: before any training
    sinks       fig1f fig1g: attention sinks
    tokens      fig4a fig4b fig4c: gains token by token
    condense    fig4d to fig8: weights along training
"""
