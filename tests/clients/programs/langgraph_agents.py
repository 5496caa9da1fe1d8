"""LangGraph: a graph with tools and a memory over ChatOpenAI, chat completions and responses. Arguments: URL, model."""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

URL, MODEL = sys.argv[1:]


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"It is sunny in {city}."


def drive(uses_responses: bool) -> None:
    chat = ChatOpenAI(
        base_url=URL + "/v1",
        api_key="none",
        model=MODEL,
        max_tokens=200,
        max_retries=0,
        use_responses_api=uses_responses,
    )
    first, then = chat.bind_tools([weather], tool_choice="weather"), chat.bind_tools([weather], tool_choice="none")

    def respond(state: MessagesState) -> dict[str, Any]:
        is_answered = isinstance(state["messages"][-1], ToolMessage)
        return {"messages": [(then if is_answered else first).invoke(state["messages"])]}

    def follow(state: MessagesState) -> str:
        return "tools" if state["messages"][-1].tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("respond", respond)
    graph.add_node("tools", ToolNode([weather]))
    graph.add_edge(START, "respond")
    graph.add_conditional_edges("respond", follow)
    graph.add_edge("tools", "respond")
    runner = graph.compile(checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}
    for turn, question in enumerate(("How is the weather in Paris?", "And in Rome?"), 1):
        messages = runner.invoke({"messages": [HumanMessage(question)]}, thread)["messages"]
        kinds = [type(message) for message in messages]
        assert kinds == [HumanMessage, AIMessage, ToolMessage, AIMessage] * turn
        assert "sunny" in messages[-2].content
    other: Any = {"configurable": {"thread_id": "2"}}
    pieces = [piece for piece, _ in runner.stream({"messages": "Hi"}, other, stream_mode="messages")]
    assert any(piece.content for piece in pieces)


for uses_responses in (False, True):
    drive(uses_responses)
