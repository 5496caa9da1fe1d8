import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.stream.IntStream;

/** Java's own client in its default setting, which offers HTTP/2 with every request. Arguments: URL, model. */
public class HttpClientChat {
    private static final HttpClient CLIENT = HttpClient.newHttpClient();

    public static void main(String[] arguments) throws Exception {
        URI uri = URI.create(arguments[0] + "/v1/chat/completions");
        HttpResponse<String> whole = CLIENT.send(request(uri, arguments[1], false), HttpResponse.BodyHandlers.ofString());
        check(whole.statusCode() == 200 && whole.body().contains("\"completion_tokens\":8"), whole.body());

        var stream = CLIENT.send(request(uri, arguments[1], true), HttpResponse.BodyHandlers.ofLines());
        List<String> events = stream.body().filter(line -> line.startsWith("data: ")).toList();
        check(events.size() > 2 && events.get(events.size() - 1).equals("data: [DONE]"), events.toString());

        List<CompletableFuture<HttpResponse<String>>> many = IntStream.range(0, 8)
            .mapToObj(i -> CLIENT.sendAsync(request(uri, arguments[1], false), HttpResponse.BodyHandlers.ofString()))
            .toList();
        for (var answer : many) check(answer.get().statusCode() == 200, answer.get().body());

        HttpResponse<String> wrong = CLIENT.send(request(uri, "other", false), HttpResponse.BodyHandlers.ofString());
        check(wrong.statusCode() == 404 && wrong.body().contains("model_not_found"), wrong.body());
    }

    private static HttpRequest request(URI uri, String model, boolean stream) {
        String body = "{\"model\": \"" + model + "\", \"messages\": [{\"role\": \"user\", \"content\": \"What is 2+2?\"}],"
            + "\"max_tokens\": 8, \"ignore_eos\": true, \"stream\": " + stream + "}";
        return HttpRequest.newBuilder(uri)
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
    }

    private static void check(boolean holds, String shown) {
        if (!holds) throw new AssertionError(shown);
    }
}
